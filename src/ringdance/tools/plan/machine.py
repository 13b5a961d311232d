"""Discrete-event model of a job's hardware: hosts, cores, and arrays whose use takes simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from ringdance.core.exchange.base import Context
from ringdance.core.transport.base import Array

Program = Generator[None, None, None]


@dataclass(frozen=True)
class Machine:
    """The hardware that a job runs on. All hosts are identical.

    Attributes:
        bandwidth: Bandwidth of a host's link in each direction, in bytes/s.
        latency: Latency between hosts, in seconds.
        memory_bandwidth: Speed, in bytes/s, at which a rank copies, adds or converts data while the other
            ranks on its host do the same.
        link_bandwidth: Speed of the same operations on GPUs that are connected within a host (such as by
            NVLink), in bytes/s, or 0 if exchanges go through host memory.
        stack_bandwidth: Speed at which a rank's core sends or receives data, in bytes/s: a few GB/s for TCP,
            inf for RDMA.
        message_seconds: Core time per message that a rank sends or receives.
        chunk_seconds: Core time for starting a collective on a chunk, or a synchronization.
        round_seconds: Core time per negotiation round.
        ranks_per_core: Number of ranks that share a core.
        turn: Seconds that each additional rank on a core adds to a step. Limited to a quarter of the
            computation time per step.
    """

    bandwidth: float
    latency: float = 20e-6
    memory_bandwidth: float = 8e9
    link_bandwidth: float = 0.0
    stack_bandwidth: float = inf
    message_seconds: float = 2e-6
    chunk_seconds: float = 10e-6
    round_seconds: float = 100e-6
    ranks_per_core: float = 1.0
    turn: float = 8e-3


class Clock:
    """A queue of events, ordered by time."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()  # events with equal times run in creation order

    def at(self, time: float, event: Callable[[float], None]) -> None:
        """Schedule the call ``event(time)``. Events run in the order of their times."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        """Process events until the queue is empty."""
        while self._events:
            time, _, event = heapq.heappop(self._events)
            event(time)


@dataclass(eq=False)
class SimulatedHost:
    """The traffic of a simulated host, and when its network link becomes free in each direction.

    Attributes:
        sent: Number of bytes sent to other hosts.
        messages: Number of messages sent to other hosts.
    """

    out_free: float = 0.0
    in_free: float = 0.0
    sent: int = 0
    messages: int = 0



@dataclass(eq=False)
class Core:
    """A simulated core, which executes a rank's program and keeps track of simulated time.

    Attributes:
        now: The rank's simulated time in seconds. The core has been busy or waiting up to this time.
        calls: Name and size in bytes of each collective that the rank has started.
    """

    machine: Machine
    clock: Clock
    host: SimulatedHost
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)
    context: Context = field(default_factory=Context)
    program: Program | None = None

    def spend(self, seconds: float) -> None:
        """Keep the core busy for the given number of seconds."""
        self.now += seconds * self.machine.ranks_per_core

    def move(self, nbytes: int) -> None:
        """Keep the core busy for the time needed to copy, add or convert ``nbytes``."""
        self.spend(nbytes / (self.machine.link_bandwidth or self.machine.memory_bandwidth))

    def messages(self, count: int, nbytes: int) -> float:
        """Return the core time for sending or receiving ``count`` messages of ``nbytes`` in total."""
        return count * self.machine.message_seconds + nbytes / self.machine.stack_bandwidth

    def resume(self, time: float) -> None:
        """Run the program until it waits for an event, which will call this method again."""
        if self.program is None:
            return
        self.now = max(self.now, time)
        achieved = self.context.achieved
        try:
            next(self.program)
        except StopIteration:
            self.program = None
            return
        if self.context.achieved != achieved:  # the program has made progress and can continue immediately
            self.clock.at(self.now, self.resume)

    def until(self, time: float) -> Program:
        """Wait until simulated time ``time``."""
        self.clock.at(time, self.resume)
        while self.now < time:
            yield


class Traced(np.ndarray[Any, Any]):
    """An array whose contents are never accessed. Operations on it only take simulated time on ``core``."""

    core: Core | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.core = getattr(other, "core", None)

    def _moved(self) -> None:
        if self.core is not None:
            self.core.move(self.nbytes)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is Ellipsis:
            self._moved()
        else:
            self[key]._moved()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **_: Any) -> Any:
        result = out[0] if out else next(part for part in inputs if isinstance(part, Traced))
        traced = result if isinstance(result, Traced) else self
        traced._moved()
        return result

    def astype(self, dtype: Any, *_: Any, **__: Any) -> Any:
        """Return a traced array with the given dtype. The conversion takes time on ``core``."""
        made = traced(np.empty(self.shape, dtype), self.core)
        made._moved()
        return made


def traced(memory: Array, core: Core | None) -> Traced:
    """Return a view of ``memory``. Operations on it take time on ``core``."""
    view = memory.view(Traced)
    view.core = core
    return view


def trace(part: Any, core: Core) -> None:
    """Replace all arrays in an exchange, and in its component objects, with traced arrays."""
    for name, value in list(vars(part).items()):
        if isinstance(value, np.ndarray):
            setattr(part, name, traced(value, core))
        for inner in value if isinstance(value, list) else (value,):
            if type(inner).__module__.startswith("ringdance.core.exchange.") and hasattr(inner, "__dict__"):
                trace(inner, core)
