"""All collectives on loopback worlds: several hosts, no shared memory, delays, small caches, many threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from by_numpy import (
    DTYPES,
    HALVES,
    INTEGERS,
    OPERATIONS,
    all_values,
    allowed,
    any_integers,
    dtype_of,
    integer_average,
    reduced,
    rows_of,
    same,
)
from loopback_job import bind, job
from sampled import sampled

import ringdance.numpy as hvd
from ringdance.core.engine import Engine
from ringdance.errors import MismatchError
from ringdance.settings import Settings

LAYOUTS: dict[str, dict[str, Any]] = {
    "one host": {"size": 3},
    "two hosts": {"size": 4, "hosts": ("a", "a", "b", "b")},
    "uneven hosts": {"size": 3, "hosts": ("a", "a", "b")},
    "hosts taken in turn": {"size": 4, "hosts": ("a", "b", "a", "b")},
    "three hosts": {"size": 3, "hosts": ("a", "b", "c")},
    "delays": {"size": 4, "hosts": ("a", "a", "b", "b"), "delay": 0.5, "seed": 3},
}
MORE_LAYOUTS = LAYOUTS | {
    "five ranks": {"size": 5, "hosts": ("a", "b", "b", "a", "b")},
    "eight ranks": {"size": 8},
}
SETTINGS = {
    "usual": Settings(),
    "tiny": Settings(chunk_bytes=4096, small_bytes=64),
    "messages": Settings(window=False),
    "apart": Settings(fusion_threshold=0, chunk_bytes=1000, small_bytes=0, cycle_time=0.0),
}


def pairs(name: str, layouts: Iterable[str], settings: Iterable[str]) -> list[Any]:
    """Return pairs of a layout and settings. `make test` takes three of all pairs a day."""
    return sampled(name, list(product(layouts, settings)), 3)


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Compare with a tolerance: hosts add their floats first, and each host rounds its 16-bit sums."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype in (np.float32, np.float64, np.complex64):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    elif got.dtype.name in HALVES:
        unit = 2.0**-8 if got.dtype.name == "bfloat16" else 2.0**-11
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=32 * unit)
    else:
        same(got, want)


@pytest.mark.parametrize("case", pairs("every verb", LAYOUTS, SETTINGS), ids=str)
def test_every_verb(case: tuple[str, str]) -> None:
    layout, setting = case
    how = dict(LAYOUTS[layout])
    size = how.pop("size")

    def program(engine: Engine) -> None:
        rank = engine.rank
        for dtype in ("float32", "bfloat16", "int64", "uint8"):
            for shape in ((), (0,), (5, 3), (3001,), (20_000,)):
                inputs = all_values(size, dtype, shape)
                for name, op in (("average", hvd.Average), ("max", hvd.Max)):
                    close(
                        hvd.allreduce(inputs[rank], op=op, name=f"{dtype} {shape} {name}"),
                        reduced(inputs, name),
                    )
                close(
                    hvd.allreduce(inputs[rank], prescale_factor=0.3, op=hvd.Sum), reduced(inputs, "sum", 0.3)
                )
            rows = all_values(size, dtype, (7, 2))
            uneven = [row[: (3 * i) % 7] for i, row in enumerate(rows)]
            same(hvd.allgather(uneven[rank]), np.concatenate(uneven))
            same(hvd.broadcast(rows[rank], size - 1), rows[-1])
            close(hvd.reducescatter(rows[rank], op=hvd.Sum), reduced(rows, "sum")[rows_of(rank, 7, size)])
            got, received = hvd.alltoall(rows[rank], [rank % 2] * size)
            assert received.tolist() == [i % 2 for i in range(size)]
            same(
                got,
                np.concatenate([row[rank * (i % 2) : (rank + 1) * (i % 2)] for i, row in enumerate(rows)]),
            )
        hvd.barrier()
        close(
            hvd.allreduce(np.full(3, 1.0 + (size - rank) * 2.0**-8, dtype_of("bfloat16"))),
            reduced(
                [np.full(3, 1.0 + (size - r) * 2.0**-8, dtype_of("bfloat16")) for r in range(size)], "average"
            ),
        )

    job(size, program, SETTINGS[setting], **how)


@pytest.mark.parametrize("case", pairs("averages of integers", MORE_LAYOUTS, SETTINGS), ids=str)
def test_averages_of_integers_are_exact(case: tuple[str, str]) -> None:
    """Averages of integers are exact on every data path, even if no partial sum fits into the type."""
    layout, setting = case
    how = dict(MORE_LAYOUTS[layout])
    size = how.pop("size")

    def program(engine: Engine) -> None:
        for dtype in INTEGERS:
            for shape in ((), (7, 3), (2001,)):
                inputs = [any_integers(rank, dtype, shape) for rank in range(size)]
                want, own_input = integer_average(inputs), inputs[engine.rank]
                same(hvd.allreduce(own_input), want)
                for got in hvd.allreduce([own_input, own_input]):
                    same(got, want)
                for _ in range(2):
                    same(hvd.allreduce(own_input, name=f"{dtype} {shape}"), want)
            same(hvd.reducescatter(own_input), want[rows_of(engine.rank, 2001, size)])

    job(size, program, SETTINGS[setting], **how)


@pytest.mark.parametrize("case", pairs("a joined rank", MORE_LAYOUTS, ["tiny", "messages"]), ids=str)
def test_a_joined_rank_changes_no_result(case: tuple[str, str]) -> None:
    """A joined rank changes no result except averages, which are still divided by the number of all ranks."""
    layout, setting = case
    how = dict(MORE_LAYOUTS[layout])
    size = how.pop("size")

    def program(engine: Engine) -> None:
        if engine.rank != 1:
            for dtype in DTYPES:
                for shape in ((5, 3), (1001,)):
                    inputs = all_values(size, dtype, shape, seed=len(shape))
                    for name in allowed(dtype):
                        present, op = inputs.copy(), OPERATIONS[name]
                        if name in ("min", "max", "product"):
                            del present[1]
                        else:
                            present[1] = np.zeros_like(present[1])
                        key = f"{dtype} {shape} {name}" if op in (hvd.Min, hvd.Product) else None
                        for _ in range(2):
                            close(hvd.allreduce(inputs[engine.rank], op=op, name=key), reduced(present, name))
            ordered = [dtype for dtype in DTYPES if "min" in allowed(dtype)]
            group = [all_values(size, dtype, (4,))[engine.rank] for dtype in ordered]
            for got, dtype in zip(hvd.allreduce(group, op=hvd.Min), ordered, strict=True):
                inputs = all_values(size, dtype, (4,))
                same(got, reduced([inputs[0], *inputs[2:]], "min"))
            for op in (hvd.Min, hvd.Max, hvd.Product):
                with pytest.raises(MismatchError, match="while some ranks have joined"):
                    hvd.allreduce(np.ones(2), op=op, prescale_factor=-0.5)
        hvd.join()

    job(size, program, SETTINGS[setting], **how)


@pytest.mark.parametrize("hosts", [None, ("a", "a", "b", "b"), ("a", "b", "c", "d")])
def test_all_ranks_have_the_same_bits(hosts: tuple[str, ...] | None) -> None:
    """All ranks get the same bits, no matter in which order the hosts add."""

    def program(engine: Engine) -> list[bytes]:
        return [
            hvd.allreduce(all_values(4, dtype, (30_011,))[engine.rank]).tobytes()
            for dtype in ("float32", "float64", *HALVES)
        ]

    results = job(4, program, Settings(chunk_bytes=8192), hosts=hosts)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_places_on_hosts(delay: float) -> None:
    def program(engine: Engine) -> tuple[int, ...]:
        return (engine.local_rank, engine.local_size, engine.cross_rank, engine.cross_size)

    assert job(3, program, hosts=("a", "a", "b"), delay=delay) == [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]
    assert job(4, program, hosts=("a", "b", "a", "b"), delay=delay) == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 2),
        (1, 2, 1, 2),
    ]


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_more_names_than_the_table_holds(capacity: int) -> None:
    """Names are evicted from the cache and come back, in a different order on each rank."""

    def program(engine: Engine) -> None:
        made = np.random.default_rng(engine.rank)
        for step in range(3):
            handles = {
                int(i): hvd.allreduce(
                    np.full(i % 3 + 1, float(engine.rank + step)), name=f"n{i}", op=hvd.Sum, wait=False
                )
                for i in made.permutation(40)
            }
            for i, handle in handles.items():
                same(hvd.synchronize(handle), np.full(i % 3 + 1, 3.0 + 3 * step))

    job(3, program, Settings(cache_capacity=capacity))


@pytest.mark.parametrize("threaded", [True, False])
def test_several_threads_submit_and_wait(threaded: bool) -> None:
    def program(engine: Engine) -> None:

        errors: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                with bind(engine):
                    for step in range(15):
                        got = hvd.allreduce(np.full(thread + 1, 1.0), name=f"{thread} {step}", op=hvd.Sum)
                        same(got, np.full(thread + 1, 2.0))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    job(2, program, threaded=threaded)


def test_sets_on_hosts_of_their_own() -> None:
    """A set within one host shares memory, and a set across hosts does not. Both work at the same time."""

    def program(engine: Engine) -> None:
        sets = {ranks: engine.add_process_set(ranks) for ranks in ((0, 1), (2, 3), (1, 2), (0, 3), (0, 1, 2))}
        assert sorted(engine.process_sets()) == [0, 1, 2, 3, 4, 5]
        for ranks, number in sets.items():
            if engine.rank in ranks:
                process_set = hvd.ProcessSet(ranks)
                process_set.process_set_id = number
                inputs = all_values(ranks, "int32", (5000,))
                same(
                    hvd.allreduce(inputs[ranks.index(engine.rank)], op=hvd.Sum, process_set=process_set),
                    reduced(inputs, "sum"),
                )
        for number in sets.values():
            engine.remove_process_set(number)
        assert list(engine.process_sets()) == [0]

    job(4, program, hosts=("a", "a", "b", "b"), delay=0.2)


def test_more_hosts_than_send_their_parts_to_all() -> None:
    size = 18

    def program(engine: Engine) -> None:
        for dtype in ("float32", "bfloat16"):
            for length in (3, 20_000):
                inputs = all_values(size, dtype, (length,))
                close(
                    hvd.allreduce(inputs[engine.rank], name=f"{dtype} {length}"), reduced(inputs, "average")
                )

    job(size, program, Settings(chunk_bytes=8192, small_bytes=64), hosts=tuple(f"h{n}" for n in range(size)))


def test_settings_of_one_rank_do_not_reach_another_world() -> None:
    """Two jobs in one process at the same time do not affect each other."""
    results: dict[int, list[np.ndarray]] = {}

    def other(value: int) -> None:
        results[value] = job(2, lambda engine: hvd.allreduce(np.full(9, value), name="same", op=hvd.Sum))

    threads = [threading.Thread(target=other, args=(value,)) for value in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in (1, 10):
        for result in results[value]:
            same(result, np.full(9, 2 * value))


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1001])
def test_pieces_of_any_size(window: bool, chunk_bytes: int) -> None:
    def program(engine: Engine) -> None:
        for dtype in ("float64", "float16", "uint8"):
            inputs = all_values(3, dtype, (501,))
            close(hvd.allreduce(inputs[engine.rank]), reduced(inputs, "average"))
            same(hvd.allgather(inputs[engine.rank]), np.concatenate(inputs))
            same(hvd.broadcast(inputs[engine.rank], 1), inputs[1])
            close(
                hvd.reducescatter(inputs[engine.rank], op=hvd.Sum),
                reduced(inputs, "sum")[rows_of(engine.rank, 501, 3)],
            )
            own = slice(167 * engine.rank, 167 * (engine.rank + 1))
            same(hvd.alltoall(inputs[engine.rank]), np.concatenate([part[own] for part in inputs]))

    job(3, program, Settings(chunk_bytes=chunk_bytes, small_bytes=0, window=window))
    job(3, program, Settings(chunk_bytes=chunk_bytes, small_bytes=0), hosts=("a", "a", "b"))
