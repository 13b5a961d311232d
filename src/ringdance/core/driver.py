"""Who drives the engine, and how it waits.

One step of the engine does what can be done without waiting. Steps are taken by a thread that
blocks on a ticket (no hand-over to another thread for a lone operation) or, for asynchronous
work, by the engine thread, which stands down while a caller drives. The driver's place is a
lock that is held during a step and never during a sleep.

Waiting: first yield the core for some microseconds, then sleep: on the doorbell where all
peers are on this host, else in naps that grow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from ringdance.core.request import Ticket
from ringdance.transport.waiting import Doorbell, yield_core

__all__ = ["Driven", "Driver"]

_LOOK_EVERY = 0.1  # seconds between looks at notes, at peers and for stalls
_IDLE = 0.1
_FLYING_NAP = 1e-4  # between hosts MPI moves data only while it is asked: a millisecond would stop the wire


class Driven(Protocol):
    """What a driver needs of its engine."""

    closed: bool

    @property
    def callers(self) -> int: ...
    @property
    def flying(self) -> int: ...
    def step(self) -> bool: ...
    def look(self) -> None: ...
    def next_due(self) -> float | None: ...
    def pausing_until(self) -> float: ...
    def abandon(self, ticket: Ticket) -> None: ...


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
        self._place = threading.Lock()
        self._chief = threading.Lock()
        self._bench: list[Ticket] = []
        self._wake = threading.Event()
        self.asleep = False
        self._looked = time.monotonic()
        self._on_start = on_start
        self._thread: threading.Thread | None = None
        if thread:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    # -- callers -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the engine thread look for work."""
        if self.asleep:
            self.asleep = False
            self._wake.set()

    def wait(self, ticket: Ticket, timeout: float | None) -> None:
        """Block until ``ticket`` is done, driving the engine. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not ticket.done():
                if self._chief.acquire(False):
                    try:
                        self._drive(ticket, deadline)
                    finally:
                        self._chief.release()
                        if self._bench:
                            self._hand_over()
                else:
                    self._sit_out(ticket, deadline)
        finally:
            if self.asleep and not self._engine.callers and self._engine.next_due() is not None:
                self.wake()

    def _drive(self, ticket: Ticket, deadline: float | None) -> None:
        spin_until = time.monotonic() + self._spin
        nap = 5e-5
        while not ticket.done():
            if self._try_step():
                spin_until = 0.0
                continue
            if ticket.done():
                return
            now = time.monotonic()
            if spin_until == 0.0:
                spin_until, nap = now + self._spin, 5e-5
            if deadline is not None and now > deadline:
                raise _timeout(ticket)
            if now < spin_until:
                yield_core()
            elif self._engine.closed:
                self._give_up(ticket)
            else:
                nap = self._sleep(now, nap)

    def _give_up(self, ticket: Ticket) -> None:
        """The engine is closed: a ticket that is not done when nobody is in a step never will be."""
        if self._place.acquire(timeout=0.02):
            try:
                if not ticket.done():
                    self._engine.abandon(ticket)
            finally:
                self._place.release()

    def _sit_out(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait while another caller drives; it hands its place over when it leaves."""
        if deadline is not None and time.monotonic() > deadline:
            raise _timeout(ticket)
        event = ticket.waiter()
        self._bench.append(ticket)
        event.wait(0.02 if deadline is None else min(0.02, max(0.0, deadline - time.monotonic())))
        self._bench.remove(ticket)
        if not ticket.done():
            event.clear()

    def _hand_over(self) -> None:
        for ticket in list(self._bench):
            if not ticket.done():
                ticket.waiter().set()
                return

    # -- both ----------------------------------------------------------------------------------

    def _try_step(self) -> bool:
        if not self._place.acquire(False):
            return False
        try:
            return self._engine.step()
        finally:
            self._place.release()

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
        if self._place.acquire(blocking=False):
            try:
                self._engine.look()
            finally:
                self._place.release()

    # -- the engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        self._on_start()
        spin_until = 0.0
        nap = 5e-5
        while not self._engine.closed:
            now = time.monotonic()
            due = None if self._engine.callers else self._engine.next_due()
            if due is None or due > now:
                self._rest(_IDLE if due is None else min(_IDLE, due - now))
                spin_until = 0.0
                continue
            try:
                moved = self._try_step()
            except BaseException:
                return  # the engine is broken and has told everybody
            if moved:
                spin_until = 0.0
            elif spin_until == 0.0:
                spin_until, nap = now + self._spin, 5e-5
            elif now < spin_until:
                yield_core()
            else:
                nap = self._sleep(now, nap)

    def _rest(self, seconds: float) -> None:
        self.asleep = True
        if (not self._engine.callers and self._engine.next_due() is None) or seconds > 0:
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


def _timeout(ticket: Ticket) -> TimeoutError:
    return TimeoutError(f"'{ticket.name}' was not complete in time; it goes on.")
