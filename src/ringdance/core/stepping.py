"""Step an engine: advance its process sets, and check its peers. Only one thread does so at a time.

Note [Interrupts]
    Ctrl-C raises KeyboardInterrupt in the main thread, but only where CPython checks for signals: after a
    call, at the start of a function, and at a backward jump. After ``lock.acquire(False)`` has taken a lock,
    the exception may be raised before the next bytecode, and the lock would stay held. Instead, a lock is an
    entry in a dict: ``setdefault`` takes it in one call within ``try``, and ``finally`` releases it using
    only subscripts, between which CPython does not check for signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringdance.core.callers import Callers
from ringdance.core.ends import EngineEnd
from ringdance.core.exchange import Context
from ringdance.core.peers import Peers
from ringdance.core.process_sets.registry import ProcessSets

_CHECK_EVERY = 0.09  # seconds between peer checks, slightly less than the engine thread rests
_CHECK_STEPS = 32  # steps with progress between peer checks in long exchanges, during which no thread sleeps
_STEP_LIMIT = 5.0  # seconds to wait for another thread's step, which usually takes microseconds


@dataclass(eq=False)
class Stepper:
    """Steps one engine.

    Any thread may call any method, except from within a step. While one thread is in a step, a
    check or an exclusive call, no other thread is in any of them.

    Attributes:
        sets: The process sets.
        context: State that the engine's exchanges share.
        callers: The threads that are waiting, and what they are waiting for.
        peers: The other ranks.
        end: Whether and how the engine has ended.
        on_check: Called each time the peers are checked.
        report: Called with each warning.
    """

    sets: ProcessSets
    context: Context
    callers: Callers
    peers: Peers
    end: EngineEnd
    on_check: Callable[[], None]
    report: Callable[[str], None]
    _checked: float = field(default_factory=time.monotonic)
    _taken: dict[int, object] = field(default_factory=dict)
    _steps: int = 0

    def step(self) -> bool:
        """Advance all process sets without blocking, unless another thread is in a step.

        Returns True if any set made progress. After every 32nd such step, the peers are checked if a check
        is due.
        """
        me, taken = object(), self._taken
        try:  # try_exclusively, inlined because waiting threads run this constantly
            if taken.setdefault(0, me) is not me or self.end.closed:
                return False
            sets, context = self.sets, self.context
            before = context.achieved
            try:
                for machine in sets.machines:
                    if next(machine[1], self) is self:
                        sets.machines = tuple(m for m in sets.machines if m is not machine)
                        context.achieved += 1
                if not sets.machines:
                    self.end.close()
            except BaseException as error:
                self.end.fail_by(error)
                if not isinstance(error, Exception):
                    raise
            if context.achieved == before:
                return False
        finally:
            try:
                if taken[0] is me:
                    del taken[0]
            except KeyError:
                pass
        self._steps += 1
        if not self._steps % _CHECK_STEPS:
            self.check_peers_if_due(time.monotonic())
        return True

    def check_peers_if_due(self, now: float) -> None:
        """Check the peers if a check is due, unless another thread is in a step."""
        if now - self._checked > _CHECK_EVERY:
            self._checked = now
            self.try_exclusively(self._check_peers)

    def _check_peers(self) -> None:
        """Read notes, detect lost peers and check for stalls."""
        end, peers = self.end, self.peers
        if end.closed:
            return
        try:
            peers.read_notes()
            self.sets.check_left(peers.post)
            self.context.recorder.publish()
            self.on_check()
            for state in self.sets.states():
                for device in state.exchange.devices.values():
                    device.check()
            if not end.closed and (lost := peers.lost()):
                peers.read_notes()  # the lost rank may have sent a note with the reason
                if not end.closed:
                    end.fail_lost(lost)
            if end.closed:
                return
            warning, error = peers.stall()
            if error is not None:
                end.fail(error(warning))
            elif warning:
                self.report(warning)
        except Exception as error:
            end.fail_by(error)

    def try_exclusively(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Make a call unless another thread is in a step. Returns True if the call was made."""
        me, taken = object(), self._taken
        try:  # Note [Interrupts]
            if taken.setdefault(0, me) is not me:
                return False
            call(*arguments)
            return True
        finally:
            try:
                if taken[0] is me:
                    del taken[0]
            except KeyError:
                pass

    def exclusively(self, call: Callable[..., object], *arguments: Any, end: bool = False) -> bool:
        """Make a call while no other thread is in a step. Returns True if the call was made.

        If another thread's step takes more than 5 s, the call is skipped. A call that ends the engine
        (``end``) is made anyway, because that step may never finish.
        """
        limit = time.monotonic() + _STEP_LIMIT
        while not self.try_exclusively(call, *arguments):
            if time.monotonic() > limit:
                if end:
                    call(*arguments)
                return end
            time.sleep(1e-4)
        return True
