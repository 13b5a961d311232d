"""The agreement vector of a round and the response cache."""

from __future__ import annotations

import random

import pytest

from ringdance.core.process_sets.agreement import (
    CONTINUE,
    HAS_UNNAMED,
    NO_WAITER,
    UNNAMED,
    CacheEntry,
    ResponseCache,
    VectorLayout,
    set_bits,
)
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
        CONTINUE,
        NO_WAITER,
        HAS_UNNAMED,
        layout.everyone << layout.misses_at,
        layout.everyone << layout.joined_at,
        layout.unnamed_field,
    ]
    assert sum(fields) == layout.neutral  # every bit is used exactly once
    assert layout.neutral.bit_length() == layout.piggyback_at
    for entries in (0, 1, 8, 9, 1024):
        assert 8 * layout.width(entries) >= layout.ready_at + entries
        assert 8 * (layout.width(entries) - 1) < layout.ready_at + entries


def equal(layout: VectorLayout, *members: list[int]) -> int:
    vector = layout.unnamed_field
    for digests in members:
        vector &= layout.unnamed(digests)
    return layout.equal_unnamed(vector)


def test_unnamed_requests_agree_or_not() -> None:
    layout = VectorLayout(3)
    first, other = described(1).digest(), described(2).digest()
    assert equal(layout, [first], [first]) == 1
    assert equal(layout, [first, other], [first, other], [first, other]) == 2
    assert equal(layout, [first, other], [first]) == 1
    assert equal(layout, [first, other], [first, first]) == 1
    assert equal(layout, [other, first], [first, first]) == 0
    assert equal(layout, [first] * UNNAMED, [first] * UNNAMED) == UNNAMED


def test_random_numbers_agree_only_when_equal() -> None:
    layout, made = VectorLayout(4), random.Random(3)
    for _ in range(2000):
        count = made.randint(1, UNNAMED)
        first = [made.choice([0, 1, 2**32 - 1, made.getrandbits(32)]) for _ in range(count)]
        second = [made.choice([value] * 5 + [value ^ 1 << made.randrange(32)]) for value in first]
        same = [a == b for a, b in zip(first, second, strict=True)]
        assert equal(layout, first, second) == [*same, False].index(False)


def test_digests() -> None:
    assert described(1).digest() == described(1).digest()
    kinds = (Collective.ALLREDUCE, Collective.ALLGATHER)
    different = {described(n, kind).digest() for n in range(50) for kind in kinds}
    assert len(different) == 100


def install(cache: ResponseCache, name: str, description: Description, used: int, wrong: bool = False) -> int:
    return cache.install(CacheEntry(name, description, used, wrong))


def test_cache_finds_what_was_entered() -> None:
    cache = ResponseCache(10)
    assert cache.find("a", described(1)) is None
    slot = install(cache, "a", described(1), 1, False)
    assert cache.find("a", described(1)) == slot
    assert cache.find("a", described(2)) is None
    assert install(cache, "a", described(2), 2, False) == slot
    assert cache.find("a", described(2)) == slot
    assert install(cache, "b", described(2), 2, True) != slot
    assert cache.find("b", described(7)) is not None  # mismatched, so any request with this name joins in
    cache.remove(slot)
    assert cache.find("a", described(2)) is None
    assert install(cache, "c", described(1), 3, False) == slot


def test_cache_evicts_what_was_used_longest_ago() -> None:
    cache = ResponseCache(3)
    for used, name in enumerate("abc"):
        install(cache, name, described(1), used, False)
    entry = cache.entries[cache.slots["a"]]
    assert entry is not None
    entry.used = 9
    install(cache, "d", described(1), 10, False)
    assert sorted(cache.slots) == ["a", "c", "d"]
    assert len(cache.entries) == 3


def test_cache_is_the_same_after_the_same_events() -> None:
    made = random.Random(1)
    events = [(str(made.randrange(40)), round_) for round_ in range(500)]
    caches = [ResponseCache(16), ResponseCache(16)]
    for name, round_ in events:
        assert len({install(cache, name, described(1), round_, False) for cache in caches}) == 1
    assert caches[0].slots == caches[1].slots
    assert install(ResponseCache(0), "x", described(1), 0) == 0
