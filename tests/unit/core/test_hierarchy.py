"""All-reduce across hosts with equal and unequal numbers of ranks: results and bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from by_numpy import HALVES, OPERATIONS, Array, all_values, allowed, reduced, same
from loopback import LoopbackTransport
from loopback_job import job
from sampled import sampled

import ringdance.numpy as hvd
from ringdance.core.engine import Engine
from ringdance.settings import Settings

LAYOUTS = ("aabb", "aaabb", "abbb", "abab", "abbaacc", "bacccb")
# too many for hosts to send blocks directly to each other, and not a power of two
MANY = "abcdefghijklmnopqr"
SMALL = Settings(chunk_bytes=4096, small_bytes=64)
LENGTH = 20_011


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count all bytes that leave each host through any collective except the agreement's."""
    sent: Counter[str] = Counter()

    def away(self: LoopbackTransport) -> list[bool]:
        own = self.identities[self.rank].host
        return [identity.host != own for identity in self.identities]

    alltoall, allgather, allreduce = (
        getattr(LoopbackTransport, name) for name in ("alltoall", "allgather", "allreduce")
    )

    def count_alltoall(self: LoopbackTransport, send: Array, counts: Sequence[int], *rest: Any) -> Any:
        far = sum(n for n, there in zip(counts, away(self), strict=True) if there)
        sent[self.identities[self.rank].host] += far
        return alltoall(self, send, counts, *rest)

    def count_allgather(self: LoopbackTransport, send: Array, *rest: Any) -> Any:
        sent[self.identities[self.rank].host] += send.nbytes * sum(away(self))
        return allgather(self, send, *rest)

    def count_allreduce(self: LoopbackTransport, buffer: Array, operation: str, *rest: Any) -> Any:
        if operation != "and":
            sent[self.identities[self.rank].host] += buffer.nbytes * sum(away(self))
        return allreduce(self, buffer, operation, *rest)

    monkeypatch.setattr(LoopbackTransport, "alltoall", count_alltoall)
    monkeypatch.setattr(LoopbackTransport, "allgather", count_allgather)
    monkeypatch.setattr(LoopbackTransport, "allreduce", count_allreduce)
    return sent


SENT = [(hosts, dtype) for hosts in LAYOUTS for dtype in ("float32", "bfloat16", "int32", "bool")]
SENT += [(MANY, "float32"), (2 * MANY, "float32")]


@pytest.mark.parametrize("case", sampled("bytes that leave a host", SENT, 8, SENT[-2:-1]), ids=str)
def test_bytes_that_leave_a_host(monkeypatch: pytest.MonkeyPatch, case: tuple[str, str]) -> None:
    """A host sends about 2·S·(n - 1)/n bytes for S bytes on n hosts, for any type and number of ranks."""
    hosts, dtype = case
    sent = count_bytes(monkeypatch)
    inputs = all_values(len(hosts), dtype, (1 << 18,))

    def program(engine: Engine) -> None:
        hvd.allreduce(inputs[engine.rank], op=hvd.Max)

    job(len(hosts), program, Settings(chunk_bytes=1 << 17), hosts=tuple(hosts))
    count = len(set(hosts))
    least = 2 * inputs[0].nbytes * (count - 1) / count
    assert sorted(sent) == sorted(set(hosts))
    for host in sent:
        assert 0.9 * least < sent[host] < 1.1 * least, f"host {host}: {sent[host]} bytes, not {least:.0f}"


@pytest.mark.parametrize("hosts", sampled("values across hosts", LAYOUTS, 3))
def test_values(hosts: str) -> None:
    """Integers and comparisons are exact. Sums of floats may differ by the order of rounding."""
    size = len(hosts)

    def program(engine: Engine) -> None:
        for dtype in ("float32", "float64", "complex64", "int64", "uint8", "bool", *HALVES):
            inputs = all_values(size, dtype, (LENGTH,))
            for name in allowed(dtype):
                if dtype in HALVES and name not in ("min", "max"):
                    continue
                got, want = hvd.allreduce(inputs[engine.rank], op=OPERATIONS[name]), reduced(inputs, name)
                if dtype.startswith(("float", "complex")) and name not in ("min", "max"):
                    np.testing.assert_allclose(
                        got, want, rtol=1e-12 if dtype == "float64" else 1e-4, atol=1e-6
                    )
                else:
                    same(got, want)
        inputs = [abs(part) for part in all_values(size, "int32", (LENGTH,))]
        scales = {"prescale_factor": 2.5, "postscale_factor": 0.75}
        same(hvd.allreduce(inputs[engine.rank], **scales), reduced(inputs, "average", 2.5, 0.75))

    job(size, program, SMALL, hosts=tuple(hosts))


@pytest.mark.parametrize("case", sampled("sums in 16 bits", list(product(LAYOUTS, HALVES)), 4), ids=str)
def test_sums_in_16_bits_are_rounded_once_on_each_host_and_once_at_the_end(case: tuple[str, str]) -> None:
    """The error is at most half a unit in the last place of each host's share and of the result."""
    hosts, dtype = case
    size, unit = len(hosts), {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    inputs = all_values(size, dtype, (LENGTH,))
    exact = np.stack([part.astype(np.float64) for part in inputs])
    members = [[rank for rank in range(size) if hosts[rank] == host] for host in sorted(set(hosts))]

    def program(engine: Engine) -> None:
        for name, divisor in (("sum", 1), ("average", size)):
            for pre, post in ((1.0, 1.0), (0.3, 1 / 7)):
                got = hvd.allreduce(
                    inputs[engine.rank], op=OPERATIONS[name], prescale_factor=pre, postscale_factor=post
                )
                shares = np.stack([exact[ranks].sum(0) for ranks in members]) * (pre * post / divisor)
                bound = unit * (abs(shares).sum(0) + abs(shares.sum(0))) * 1.01
                # rounding of float32, and float16 values with fewer bits
                bound += 1e-6 * abs(exact).sum(0) + 1e-7
                assert (abs(got.astype(np.float64) - shares.sum(0)) <= bound).all()

    job(size, program, SMALL, hosts=tuple(hosts))


def test_an_average_in_16_bits_does_not_overflow() -> None:
    hosts = "aaabb"

    def program(engine: Engine) -> None:
        values = np.full(LENGTH, 60_000, np.float16)
        values[::2] *= -1 if hosts[engine.rank] == "a" else 1
        got = hvd.allreduce(values)
        assert set(got[1::2].tolist()) == {60_000.0}
        np.testing.assert_allclose(got[::2], 60_000 * (2 - 3) / 5, rtol=2e-3)

    job(len(hosts), program, SMALL, hosts=tuple(hosts))


@pytest.mark.parametrize("hosts", sampled("bits of all ranks", LAYOUTS, 3))
def test_all_ranks_have_the_same_bits(hosts: str) -> None:
    def program(engine: Engine) -> list[bytes]:
        return [
            hvd.allreduce(all_values(len(hosts), dtype, (LENGTH,))[engine.rank]).tobytes()
            for dtype in ("float32", *HALVES)
        ]

    results = job(len(hosts), program, SMALL, hosts=tuple(hosts), delay=0.2, seed=5)
    assert all(result == results[0] for result in results)
