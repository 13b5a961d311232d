"""Data of any size move in bounded rounds.

MPI's counts end at 2^31, and packing all data at once would take too much memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_numpy import same
from loopback import LoopbackTransport, LoopbackWorld
from loopback_job import job

import ringdance.numpy as hvd
from ringdance.core.engine import Engine
from ringdance.core.exchange import Context, exchange_for
from ringdance.settings import Settings

PIECE = 1 << 16
MOST = 32 * PIECE  # bytes that one MPI call may send or receive
LENGTH = 5_000_003


def test_no_call_moves_more_than_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def watch(name: str) -> None:
        real = getattr(LoopbackTransport, name)

        def call(self: LoopbackTransport, *args: Any) -> Any:
            calls.append(max(arg.nbytes for arg in args if isinstance(arg, np.ndarray)))
            return real(self, *args)

        monkeypatch.setattr(LoopbackTransport, name, call)

    for name in ("allreduce", "broadcast", "allgather", "alltoall"):
        watch(name)

    def program(engine: Engine) -> None:
        rank = engine.rank
        rows = [(np.arange(LENGTH) % (97 + rank)).astype(np.uint8) for rank in range(2)]
        own = rows[rank]
        same(hvd.allreduce(own, op=hvd.Max), np.maximum(*rows))
        same(hvd.broadcast(own, 1), rows[1])
        half = LENGTH // 2
        same(hvd.allgather(own[: half + rank]), np.concatenate([rows[0][:half], rows[1][: half + 1]]))
        got, received = hvd.alltoall(own, [5, LENGTH - 5] if rank == 0 else [7, LENGTH - 7])
        assert received.tolist() == ([5, 7] if rank == 0 else [LENGTH - 5, LENGTH - 7])
        parts = [row[: 5 + 2 * i] if rank == 0 else row[5 + 2 * i :] for i, row in enumerate(rows)]
        same(got, np.concatenate(parts))
        total = rows[0] + rows[1]
        same(hvd.reducescatter(own, op=hvd.Sum), total[: half + 1] if rank == 0 else total[half + 1 :])

    job(2, program, Settings(window=False, chunk_bytes=PIECE))
    assert max(calls) <= MOST
    assert sum(size > MOST // 4 for size in calls) >= 2 * 4 * (LENGTH // MOST)  # but not far below


@pytest.mark.limit(20)
def test_who_waits_does_not_wait_for_the_cycle_time() -> None:
    def program(engine: Engine) -> None:
        for number in range(3):
            same(hvd.allreduce(np.ones(3), op=hvd.Sum, name=f"named.{number}"), np.full(3, 2.0))
            same(hvd.allgather(np.ones(1)), np.ones(2))

    job(2, program, Settings(cycle_time=60_000.0))


def test_long_copies_show_progress() -> None:
    context = Context()
    exchange = exchange_for(LoopbackWorld(1).transport(0), PIECE, 0, context)
    source = np.resize(np.arange(251, dtype=np.uint8), 35 << 20)
    target = np.empty_like(source)
    assert len(list(exchange.copy(source, target))) == context.achieved == 2
    same(target, source)
