"""Chunk plans and batches: each element is in exactly one block, and no batch mixes kinds."""

from __future__ import annotations

import random

import pytest

from ringdance.core.exchange.chunks import chunks, even_rows, segments
from ringdance.core.process_sets.batch import description_bytes, plan_batches
from ringdance.core.request import Collective, Description, ReduceOp


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("limit", [1, 5, 16, 64, 1000])
def test_every_element_once_and_blocks_apart(members: int, limit: int) -> None:
    made = random.Random(members * 1000 + limit)
    for _ in range(20):
        sizes = tuple(made.choice([0, 1, 2, 15, 16, 17, 100]) for _ in range(made.randint(1, 8)))
        seen = [[0] * size for size in sizes]
        for plan in chunks(sizes, limit, members):
            assert len(plan) == members
            used = [0] * limit
            for part in plan:
                for tensor, start, stop, at, end in part:
                    assert stop - start == end - at > 0
                    for i in range(start, stop):
                        seen[tensor][i] += 1
                    for i in range(at, end):
                        used[i] += 1
            assert max(used) <= 1
        assert all(count == 1 for row in seen for count in row)


def test_no_elements_no_chunks() -> None:
    assert chunks((0, 0), 16, 3) == ()


def test_blocks_begin_at_whole_cache_lines() -> None:
    for plan in chunks((100_000,), 4096, 3):
        assert all(part[0].at % 16 == 0 for part in plan if part)


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("limit", [100, 240, 241, 256, 500])
def test_a_block_has_one_position_in_all_chunks(members: int, limit: int) -> None:
    for row in range(limit, 6 * limit, 7):
        plan = chunks((row // 3, 7, 0, row - row // 3), limit, members)
        used = [
            {i for blocks in plan for part in blocks[index] for i in range(part.at, part.end)}
            for index in range(members)
        ]
        assert sum(map(len, used)) == len(set().union(*used)) <= limit


def test_chunks_are_about_equal() -> None:
    plan = chunks((1000,), 300, 2)
    lengths = [sum(part.end - part.at for block in blocks for part in block) for blocks in plan]
    assert lengths == [256, 256, 256, 232]


def test_segments_cut_at_tensor_borders() -> None:
    parts = segments([0, 3, 3, 10], 1, 8, 5)
    assert [tuple(part) for part in parts] == [(0, 1, 3, 5, 7), (2, 0, 5, 7, 12)]


def test_even_rows() -> None:
    assert even_rows(10, 4) == [3, 3, 2, 2]
    assert even_rows(2, 4) == [1, 1, 0, 0]
    assert even_rows(0, 3) == [0, 0, 0]


def reduce(shape: tuple[int, ...], dtype: str = "float32", **others: object) -> Description:
    return Description(Collective.ALLREDUCE, (dtype,), (shape,), **others)  # type: ignore[arg-type]


def test_bytes_of_a_description() -> None:
    assert description_bytes(Description(Collective.ALLREDUCE, ("float64", "bfloat16"), ((2, 3), ()))) == 50
    assert description_bytes(reduce((4, 0))) == 0


def test_batches_hold_at_most_the_threshold() -> None:
    descriptions = [reduce((n,)) for n in (10, 10, 10, 1000, 5, 5)]
    assert plan_batches(descriptions, 80) == [[0, 1], [2], [3], [4, 5]]
    assert plan_batches(descriptions, 0) == [[i] for i in range(6)]
    assert plan_batches(descriptions, 1 << 20) == [list(range(6))]


def test_batches_are_of_one_kind() -> None:
    descriptions = [
        reduce((1,)),
        reduce((1,), "int32"),
        reduce((1,), operation=ReduceOp.MAX),
        reduce((1,), prescale=2.0),
        reduce((1,)),
        reduce((1,), operation=ReduceOp.ADASUM),
        Description(Collective.BARRIER),
        Description(Collective.BROADCAST, ("float32",), ((1,),), root=0),
        Description(Collective.BROADCAST, ("int8",), ((1,),), root=1),
        Description(Collective.BROADCAST, ("float32",), ((3,),), root=0),
    ]
    batches = plan_batches(descriptions, 1 << 20)
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert [0, 4] in batches
    assert [7, 9] in batches
    assert len(batches) == 8
