"""Who drives the engine, and how it waits.

One step of the engine does what can be done without waiting. Steps are taken by a thread that
blocks on a Work (no hand-over to another thread for a lone operation) or, for asynchronous
work, by the engine thread, which stands down while a caller drives. One thread at a time is in
a step, none while it sleeps; of several callers one leads and the others follow it.

Waiting: first yield the core for some microseconds, then sleep: on the doorbell where all
peers are on this host, else in naps that grow.

Note [Interrupts]
    Ctrl-C raises KeyboardInterrupt in the main thread, but only where CPython looks for signals: after a
    call, at the start of a function, at a jump back. ``lock.acquire(False)`` can therefore take a lock and
    raise before the next bytecode, and nobody would release it. What must not stay taken is an entry of a
    dict: ``setdefault`` takes it in one call within ``try``, and ``finally`` gives it back by
    subscripts alone, between which no signal is looked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ringdance.core.request import Work
from ringdance.transport.eventcount import Doorbell, yield_core

__all__ = ["Driven", "Driver"]

_LOOK_EVERY = 0.1  # seconds between looks at notes, at peers and for stalls
_LOOK_STEPS = 32  # and of those that achieve something, in an exchange so long that nobody sleeps
_IDLE = 0.1
_FOLLOWER_POLL = 0.02  # for two threads that wait for one work: they share what wakes them
_FLYING_NAP = 1e-4  # between hosts MPI moves data only while it is asked: a millisecond would stop the wire


class Driven(Protocol):
    """What a driver needs of its engine."""

    closed: bool

    @property
    def callers(self) -> dict[object, Work]: ...
    @property
    def flying(self) -> int: ...
    def step(self) -> bool: ...
    def look(self) -> None: ...
    def next_due(self) -> float | None: ...
    def pausing_until(self) -> float: ...
    def abandon(self, work: Work) -> None: ...
    def thread_failed(self, error: BaseException) -> None: ...


def _alone(taken: dict[int, object], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call unless another thread does so; return the result or None. See Note [Interrupts]."""
    me = object()
    try:
        return call(*arguments) if taken.setdefault(0, me) is me else None
    finally:
        try:
            if taken[0] is me:
                del taken[0]
        except KeyError:
            pass


class Driver:
    """Drives one engine.

    Attributes:
        asleep: the engine thread rests and has to be woken.

    Args:
        engine: what is driven.
        spin_seconds: how long to poll before sleeping.
        doorbell: wakes this rank; None where peers cannot reach it (other hosts).
        thread: whether to run the engine thread.
    """

    def __init__(
        self,
        engine: Driven,
        spin_seconds: float,
        doorbell: Callable[[], Doorbell | None],
        name: str,
        thread: bool,
        on_start: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._spin = spin_seconds
        self._doorbell = doorbell
        self._stepping: dict[int, object] = {}
        self._leading: dict[int, object] = {}
        self._wake = threading.Event()
        self.asleep = False
        self._steps = 0
        self._looked = time.monotonic()
        self._on_start = on_start
        self._thread: threading.Thread | None = None
        if thread:
            self._thread = threading.Thread(target=self._thread_main, name=name, daemon=True)
            self._thread.start()

    # -- callers -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the engine thread look for work."""
        if self.asleep:
            self.asleep = False
            self._wake.set()

    def wait(self, work: Work, timeout: float | None) -> None:
        """Block until ``work`` is done, driving the engine. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        me, leading = object(), self._leading
        while not work.done():
            try:
                if leading.setdefault(0, me) is me:
                    self._drive(work, deadline)
                    return
            finally:
                try:
                    if leading[0] is me:
                        del leading[0]
                except KeyError:
                    pass
            self._follow(work, deadline)

    def caller_left(self) -> None:
        """Let another caller lead, or the engine thread work, now that ``Driven.callers`` has one less."""
        if callers := self._engine.callers:
            for work in list(callers.values()):
                if not work.done():
                    work.waiter().set()
                    return
        if self.asleep and self._engine.next_due() is not None:
            self.wake()

    def _drive(self, work: Work, deadline: float | None) -> None:
        spin_until = time.monotonic() + self._spin
        nap = 5e-5
        while not work.done():
            if self._try_step():
                spin_until = 0.0
                continue
            if work.done():
                return
            now = time.monotonic()
            if spin_until == 0.0:
                spin_until, nap = now + self._spin, 5e-5
            if deadline is not None and now > deadline:
                raise _timeout(work)
            if now < spin_until:
                yield_core()
            elif self._engine.closed:  # a Work not done when nobody is in a step never will be
                if _alone(self._stepping, self._engine.abandon, work) is None:
                    time.sleep(1e-3)
            else:
                nap = self._sleep(now, nap)

    def _follow(self, work: Work, deadline: float | None) -> None:
        """Wait while another caller leads, until it leaves or the work is done."""
        seconds = _FOLLOWER_POLL if deadline is None else deadline - time.monotonic()
        if seconds < 0:
            raise _timeout(work)
        event = work.waiter()
        event.wait(min(_FOLLOWER_POLL, seconds))
        if not work.done():
            event.clear()

    # -- both ----------------------------------------------------------------------------------

    def _try_step(self) -> bool:
        me, stepping = object(), self._stepping
        try:  # as _alone, without its call: this is what a waiting thread does all the time
            if stepping.setdefault(0, me) is not me or not self._engine.step():
                return False
        finally:
            try:
                if stepping[0] is me:
                    del stepping[0]
            except KeyError:
                pass
        self._steps += 1
        if not self._steps % _LOOK_STEPS and time.monotonic() - self._looked > _LOOK_EVERY:
            self.look(time.monotonic())
        return True

    def _sleep(self, now: float, nap: float) -> float:
        """Sleep until something may have changed; return the next nap's length."""
        if now - self._looked > _LOOK_EVERY:
            self.look(now)
        pause = self._engine.pausing_until() - now
        bell = self._doorbell()
        if bell is None and self._engine.flying:
            time.sleep(_FLYING_NAP)
            return nap
        if bell is None:
            time.sleep(min(nap, pause) if pause > 0 else nap)
            return min(nap * 1.25, 2e-4 if nap < 2e-4 else 1e-3)
        seen = bell.glance()
        if self._try_step():
            bell.awake()
        else:
            bell.sleep(seen, min(0.02, pause) if pause > 0 else 0.02)
        return nap

    def look(self, now: float) -> None:
        """Look for notes from others, for lost peers and for stalls."""
        self._looked = now
        _alone(self._stepping, self._engine.look)

    # -- the engine thread ---------------------------------------------------------------------

    def _thread_main(self) -> None:
        try:
            self._on_start()
            self._run()
        except BaseException as error:
            self._engine.thread_failed(error)

    def _run(self) -> None:
        spin_until = 0.0
        nap = 5e-5
        while not self._engine.closed:
            now = time.monotonic()
            if self._seconds_to_work(now) > 0:
                self._rest()
                spin_until = 0.0
            elif self._try_step():
                spin_until = 0.0
            elif spin_until == 0.0:
                spin_until, nap = now + self._spin, 5e-5
            elif now < spin_until:
                yield_core()
            else:
                nap = self._sleep(now, nap)

    def _seconds_to_work(self, now: float) -> float:
        """Return how long the engine thread has nothing to do, at most ``_IDLE`` (callers drive)."""
        due = None if self._engine.callers else self._engine.next_due()
        return _IDLE if due is None else min(_IDLE, due - now)

    def _rest(self) -> None:
        self.asleep = True  # before the look: who submits after it wakes this thread
        seconds = self._seconds_to_work(time.monotonic())
        if seconds > 0:
            self._wake.wait(seconds)
        self.asleep = False
        self._wake.clear()
        now = time.monotonic()
        if not self._engine.callers and now - self._looked >= 0.9 * _LOOK_EVERY:
            self.look(now)

    def join(self) -> None:
        """Wait for the engine thread to end (the engine is closed)."""
        thread = self._thread
        self.asleep = False
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)


def _timeout(work: Work) -> TimeoutError:
    return TimeoutError(f"'{work.name}' was not complete in time; it goes on.")
