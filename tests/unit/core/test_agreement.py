"""The vector of a round and the table of known tensors."""

from __future__ import annotations

import random

import pytest

from ringdance.core.agreement import CALM, GO, HEAD, KnownTensors, VectorLayout, run_digest, set_bits
from ringdance.core.request import Collective, Description


def described(n: int, kind: Collective = Collective.ALLREDUCE) -> Description:
    return Description(kind, ("float32",), ((n,),))


def test_set_bits() -> None:
    assert set_bits(0) == []
    assert set_bits(0b10110 | 1 << 200) == [1, 2, 4, 200]


@pytest.mark.parametrize("size", [2, 3, 9, 1000])
def test_fields_of_a_vector_do_not_touch(size: int) -> None:
    layout = VectorLayout(size)
    fields = [
        GO,
        CALM,
        HEAD,
        layout.everyone << layout.news_at,
        layout.everyone << layout.joined_at,
        layout.unnamed_mask << layout.unnamed_at,
    ]
    assert sum(fields) == layout.all_quiet  # no bit twice, none left out
    assert layout.all_quiet.bit_length() == layout.rider_at
    for entries in (0, 1, 8, 9, 1024):
        assert 8 * layout.width(entries) >= layout.ready_at + entries
        assert 8 * (layout.width(entries) - 1) < layout.ready_at + entries


def agreed(layout: VectorLayout, *fields: int) -> tuple[bool, bool, bool]:
    vector = layout.unnamed_mask
    for field in fields:
        vector &= field
    return layout.read_unnamed(vector << layout.unnamed_at)


def test_unnamed_requests_agree_or_not() -> None:
    layout = VectorLayout(3)
    one, other = described(1).digest(), described(2).digest()
    assert agreed(layout, layout.unnamed(5, one, 0), layout.unnamed(5, one, 0)) == (True, True, False)
    assert agreed(layout, layout.unnamed(5, one, 9), layout.unnamed(5, one, 9)) == (True, True, True)
    assert agreed(layout, layout.unnamed(5, one, 9), layout.unnamed(5, one, 0)) == (True, True, False)
    assert agreed(layout, layout.unnamed(5, one, 9), layout.unnamed(5, one, 8)) == (True, True, False)
    assert agreed(layout, layout.unnamed(5, one, 9), layout.unnamed(5, other, 9)) == (True, False, True)
    assert not agreed(layout, layout.unnamed(5, one, 9), layout.unnamed(6, one, 9))[0]
    assert agreed(layout, layout.unnamed(1 << 40 | 7, one, 9), layout.unnamed(1 << 40 | 7, one, 9))[0]


def test_random_numbers_agree_only_when_equal() -> None:
    layout, made = VectorLayout(4), random.Random(3)
    for _ in range(2000):
        first = [made.choice([0, 1, 2, 3, 2**32 - 1]), made.getrandbits(64), made.getrandbits(64)]
        second = [made.choice([value, value ^ 1 << made.randrange(30)]) for value in first]
        found = agreed(layout, layout.unnamed(*first), layout.unnamed(*second))
        assert found == tuple(a == b for a, b in zip(first, second, strict=True))


def test_digests() -> None:
    assert described(1).digest() == described(1).digest()
    kinds = (Collective.ALLREDUCE, Collective.ALLGATHER)
    different = {described(n, kind).digest() for n in range(50) for kind in kinds}
    assert len(different) == 100
    assert run_digest([described(1), described(2)]) != run_digest([described(2), described(1)])


def test_table_finds_what_it_was_told() -> None:
    table = KnownTensors(10)
    assert table.find("a", described(1)) is None
    slot = table.install("a", described(1), 1, False)
    assert table.find("a", described(1)) == slot
    assert table.find("a", described(2)) is None
    assert table.install("a", described(2), 2, False) == slot
    assert table.find("a", described(2)) == slot
    assert table.install("b", described(2), 2, True) != slot
    assert table.find("b", described(7)) is not None  # disputed: whatever is submitted takes part
    table.remove(slot)
    assert table.find("a", described(2)) is None
    assert table.install("c", described(1), 3, False) == slot


def test_table_evicts_what_was_used_longest_ago() -> None:
    table = KnownTensors(3)
    for used, name in enumerate("abc"):
        table.install(name, described(1), used, False)
    entry = table.entries[table.slots["a"]]
    assert entry is not None
    entry.used = 9
    table.install("d", described(1), 10, False)
    assert sorted(table.slots) == ["a", "c", "d"]
    assert len(table.entries) == 3


def test_table_is_the_same_after_the_same_events() -> None:
    made = random.Random(1)
    events = [(str(made.randrange(40)), round_) for round_ in range(500)]
    tables = [KnownTensors(16), KnownTensors(16)]
    for name, round_ in events:
        assert len({table.install(name, described(1), round_, False) for table in tables}) == 1
    assert tables[0].slots == tables[1].slots
    assert KnownTensors(0).install("x", described(1), 0, False) == 0
