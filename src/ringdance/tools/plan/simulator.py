"""Predict the duration of a training step by running the engine's own code on simulated hosts.

``simulate`` performs the same operations as the engine during a step, but with a simulated clock and network.
Gradients become ready while the rank computes, negotiation rounds start, requests are grouped into batches,
and batches are exchanged. Because this uses the functions in ``ringdance.core``, predictions reflect changes
to the engine. The simulation ignores packet loss, congestion in the network core (only ranks on the same
host share a link), and the fact that MPI only makes progress while one of its functions is being called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from statistics import NormalDist
from typing import Any

import numpy as np

from ringdance.core.collectives import allreduce_flat
from ringdance.core.exchange import exchange_for
from ringdance.core.exchange.arithmetic import dtype_named, reduction
from ringdance.core.process_sets.agreement import VectorLayout
from ringdance.core.process_sets.batch import plan_batches
from ringdance.core.process_sets.registry import buffer_bytes
from ringdance.core.process_sets.state import eager_due
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.core.transport.base import Array, Identity
from ringdance.errors import LaunchError
from ringdance.settings import Settings
from ringdance.tools.plan.machine import Clock, Core, Machine, Program, SimulatedHost, trace, traced
from ringdance.tools.plan.network import Group, SimulatedTransport, SimulatedWindow

__all__ = ["Gradients", "Machine", "Step", "expected_largest", "simulate"]

_MOST_RANKS = 1_000_000
Gradients = Sequence[tuple[int, float]]
"""For each gradient: size in bytes as float32, and seconds from the start of the step until it is ready."""


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        seconds: Duration of the whole step.
        exposed_seconds: Time from the end of the computation to the end of the step.
        compute_seconds: Duration of the computation on a single rank.
        sent_bytes: Number of bytes that the host with the most traffic sends to other hosts.
        messages: Number of messages that the same host sends to other hosts.
        rounds: Number of negotiation rounds.
        calls: Name and size in bytes of each collective that rank 0 starts.
    """

    seconds: float
    exposed_seconds: float
    compute_seconds: float
    sent_bytes: int
    messages: int
    rounds: int
    calls: tuple[tuple[str, int], ...]

    @property
    def efficiency(self) -> float:
        """Speed per rank, relative to the speed of a single rank."""
        return self.compute_seconds / self.seconds


def expected_largest(count: int) -> float:
    """Return the expected maximum of ``count`` standard normal samples (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def simulate(
    machine: Machine, hosts: int, ranks_per_host: int, gradients: Gradients, compute_seconds: float, *,
    wire_dtype: str = "float32", settings: Settings | None = None, all_hosts: bool = False,
) -> Step:  # fmt: skip
    """Predict one step.

    Args:
        machine: Hardware of the hosts.
        hosts: Number of hosts.
        ranks_per_host: Number of ranks on each host.
        gradients: Gradients in any order. Requests are batched in the order in which gradients become ready.
        compute_seconds: Duration of the forward pass, backward pass and parameter update on a single rank.
        wire_dtype: Wire dtype of the gradients. 16-bit types halve the number of bytes sent.
        settings: Engine settings. Uses fusion_threshold, cycle_time (ms), chunk_bytes, small_bytes and
            deterministic. Defaults to ``Settings()``.
        all_hosts: If True, execute all hosts instead of only one. See Note [One host for all].
    """
    size = hosts * ranks_per_host
    if size > _MOST_RANKS:  # more ranks would use too much memory
        raise LaunchError(f"cannot simulate {size:,} ranks. The maximum is {_MOST_RANKS:,}")
    gradients = sorted(gradients, key=itemgetter(1))
    job = _Job(machine, gradients, compute_seconds, wire_dtype, settings or Settings())
    turn = min(machine.turn, compute_seconds / 4)  # a short step fits in one time slice
    late = turn * max(0.0, machine.ranks_per_core - 1)
    if size == 1 or not gradients:
        return Step(compute_seconds + late, late, compute_seconds, 0, 0, 0, ())
    cores = job.start(hosts, ranks_per_host, all_hosts)
    for core in cores:
        core.clock.at(0.0, core.resume)
    cores[0].clock.run()
    waiting = sum(core.program is not None for core in cores)
    if waiting:
        raise RuntimeError(f"The simulation ended with {waiting} of {len(cores)} ranks waiting.")
    exposed = max(0.0, max(core.now for core in cores) - compute_seconds) + late
    host = max((core.host for core in cores), key=lambda host: host.sent)
    return Step(
        compute_seconds + exposed, exposed, compute_seconds, host.sent, host.messages, len(job.agreed),
        tuple(cores[0].calls),
    )  # fmt: skip


@dataclass
class _Job:
    """State shared by the ranks in a simulated step.

    Attributes:
        agreed: For each round, the number of gradients that were ready when the first rank entered it.
        memory: Memory shared by all arrays. Its contents are never accessed.
    """

    machine: Machine
    gradients: Gradients
    compute: float
    dtype: str
    settings: Settings
    agreed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready, counts = [ready for _, ready in self.gradients], [size // 4 for size, _ in self.gradients]
        kind = partial(Description, Collective.ALLREDUCE, (self.dtype,), operation=ReduceOp.AVERAGE)
        self.descriptions = [kind(shapes=((count,),)) for count in counts]
        longest = max(counts, default=0) * dtype_named(self.dtype).itemsize
        self.memory = np.empty(max(longest, buffer_bytes(self.settings)), np.uint8)

    def start(self, hosts: int, ranks_per_host: int, all_hosts: bool) -> list[Core]:
        """Create the executed ranks with their programs. Returns the core of each rank."""
        clock, executed = Clock(), hosts if all_hosts else 1
        numbers = [host for host in range(hosts) for _ in range(ranks_per_host)]
        identities = tuple(Identity(rank, f"host{host}", 0) for rank, host in enumerate(numbers))
        made = [SimulatedHost() for _ in range(executed)] * (1 if all_hosts else hosts)
        everyone = Group([made[number] for number in numbers], numbers)
        crossing = [Group(made, range(hosts)) for _ in range(ranks_per_host)]
        memory = self.memory[: buffer_bytes(self.settings)]
        cores, windowed = [], ranks_per_host > 1 and self.settings.window
        for host in range(executed):
            first, windows = host * ranks_per_host, list[SimulatedWindow]()
            here = range(first, first + ranks_per_host)
            for rank, cross in zip(here, crossing, strict=True):
                core = Core(self.machine, clock, made[host])
                transport = SimulatedTransport(core, everyone, rank, identities, here)
                if windowed:
                    transport.window = SimulatedWindow(core, windows, ranks_per_host, memory)
                    transport.cross = cross if hosts > 1 else None
                core.program = self._program(core, transport)
                cores.append(core)
        return cores

    def _program(self, core: Core, transport: SimulatedTransport) -> Program:
        """Run one rank's simulated engine for a step."""
        settings, size = self.settings, transport.size
        exchange = exchange_for(
            transport, settings.chunk_bytes, settings.small_bytes, core.context, settings.deterministic
        )
        trace(exchange, core)
        how = reduction(self.dtype, ReduceOp.AVERAGE, 1.0, 1.0, size)
        vector = np.empty(VectorLayout(size).width(len(self.ready)), np.uint8)
        done, rounds, since = 0, 0, self.ready[0]
        while done < len(self.ready):
            yield from core.until(max(core.now, self._due(since), self.ready[done]))
            if rounds == len(self.agreed):
                self.agreed.append(sum(ready <= core.now for ready in self.ready))
            core.spend(self.machine.round_seconds)
            if transport.one_host and transport.window is not None:
                transport.window.signal()
                while not transport.window.reached():
                    yield
            else:
                pending = transport.allreduce(vector, "and")
                while not pending.test():
                    yield
            chosen = range(done, self.agreed[rounds])
            for batch in plan_batches([self.descriptions[i] for i in chosen], settings.fusion_threshold):
                requests = [self._request(chosen[i], core, how.dtype) for i in batch]
                yield from allreduce_flat(exchange, requests, how)
            done, rounds = chosen.stop, rounds + 1
            if done < len(self.ready):
                since = max(core.now, self.ready[done])

    def _due(self, since: float) -> float:
        """Return when the next round starts: when requests are due, or earlier if the computation ends."""
        cycle = self.settings.cycle_time * 1e-3
        due = since + cycle
        for ready in self.ready:
            if since < ready <= due:
                due = eager_due(since, ready, cycle)
        return min(due, self.compute)

    def _request(self, number: int, core: Core, dtype: np.dtype[Any]) -> Request:
        """Return the request for gradient ``number``. All requests share the same memory."""
        description = self.descriptions[number]
        count = description.shapes[0][0]
        view: Array = traced(self.memory[: count * dtype.itemsize].view(dtype), core)
        if self.dtype != "float32":
            core.move(2 * view.nbytes)  # conversion to the wire dtype and back
        return Request(description, (view,), (view,))
