"""The progress engine: steps the engine and waits for progress.

One step advances the engine as far as possible without blocking. A thread that waits for a Work makes the
steps itself, so a lone operation does not need another thread. For asynchronous operations, the engine thread
makes them, but it rests while callers wait. Only one thread at a time is in a step, and no thread sleeps
while it is in one. If there are several callers, one leads and the others follow.

A waiting thread first yields the core for some microseconds, then sleeps: on the event count if all peers are
on this host, otherwise for increasing intervals.

Note [Interrupts]
    Ctrl-C raises KeyboardInterrupt in the main thread, but only where CPython checks for signals: after a
    call, at the start of a function, at a backward jump. ``lock.acquire(False)`` can therefore take a lock
    and raise before the next bytecode, and the lock would stay taken. Instead, a lock is an entry of a dict:
    ``setdefault`` takes it in one call within ``try``, and ``finally`` releases it using only subscripts,
    between which CPython does not check for signals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ringdance.core.request import Work
from ringdance.core.stepping import Stepper
from ringdance.core.transport.eventcount import yield_core

_CHECK_EVERY = 0.1  # seconds between checks of the peers
_CHECK_STEPS = 32  # productive steps between checks, for exchanges so long that no thread sleeps
_IDLE = 0.1
_FOLLOWER_POLL = 0.02  # for two threads that wait for the same Work: they share one event
_TRANSIT_SLEEP = 1e-4  # between hosts MPI moves data only while it is called: longer sleeps would stop it
_FIRST_BACKOFF = 5e-5
_STEP_LIMIT = 5.0  # seconds for another thread to finish its step; most steps take microseconds


def _unless_taken(taken: dict[int, object], call: Callable[..., Any], *arguments: Any) -> Any:
    """Make the call unless another thread is doing so. Returns the result or None. See Note [Interrupts]."""
    me = object()
    try:
        return call(*arguments) if taken.setdefault(0, me) is me else None
    finally:
        try:
            if taken[0] is me:
                del taken[0]
        except KeyError:
            pass


class ProgressEngine:
    """Steps one engine, on the threads that wait and on its own thread.

    Attributes:
        asleep: True while the engine thread rests and has to be woken.

    Args:
        stepper: Makes the steps.
        spin_seconds: Seconds to poll before sleeping.
    """

    def __init__(self, stepper: Stepper, spin_seconds: float) -> None:
        self._stepper = stepper
        self._spin = spin_seconds
        self._stepping: dict[int, object] = {}
        self._leading: dict[int, object] = {}
        self._wake = threading.Event()
        self.asleep = False
        self._steps = 0
        self._checked = time.monotonic()
        self._thread: threading.Thread | None = None

    def start_thread(self, name: str) -> None:
        """Start the engine thread. The engine must be fully constructed."""
        self._thread = threading.Thread(target=self._thread_main, name=name, daemon=True)
        self._thread.start()

    # -- callers -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Tell the engine thread to look for work."""
        if self.asleep:
            self.asleep = False
            self._wake.set()

    def wait(self, work: Work, timeout: float | None) -> None:
        """Block until ``work`` is done, while stepping the engine. Raises TimeoutError."""
        began = time.monotonic()
        work.waited_since = work.waited_since or began
        deadline = None if timeout is None else began + timeout
        me, leading = object(), self._leading
        while not work.complete:
            try:
                if leading.setdefault(0, me) is me:
                    self._lead(work, began, deadline)
                    return
            finally:
                try:
                    if leading[0] is me:
                        del leading[0]
                except KeyError:
                    pass
            self._follow(work, deadline)
            began = time.monotonic()

    def caller_left(self) -> None:
        """Hand over to another caller, or to the engine thread, because a caller has left."""
        if waiting := self._stepper.callers.waiting:
            for work in list(waiting.values()):
                if not work.complete:
                    work.waiter().set()
                    return
        if self.asleep and self._stepper.sets.next_due() is not None:
            self.wake()

    def _lead(self, work: Work, began: float, deadline: float | None) -> None:
        spin_until, backoff = began + self._spin, _FIRST_BACKOFF
        while not work.complete:
            if self._try_step():
                spin_until = 0.0
                continue
            now = time.monotonic()
            if spin_until == 0.0:
                spin_until, backoff = now + self._spin, _FIRST_BACKOFF
            if deadline is not None and now > deadline and not work.complete:
                raise _timeout(work)
            if now < spin_until:
                yield_core()
            elif self._stepper.end.closed:  # a Work that is not done by now never will be
                if _unless_taken(self._stepping, self._stepper.end.abandon, work) is None:
                    time.sleep(1e-3)
            elif not work.complete:  # another thread's step may have completed it
                backoff = self._sleep(now, backoff)
        recorder, waited = self._stepper.context.recorder, time.monotonic() - began
        recorder.waited += waited
        if recorder.detail:
            recorder.wait(work, waited)

    def _follow(self, work: Work, deadline: float | None) -> None:
        """Wait while another caller leads, until that caller leaves or the work is done."""
        seconds = _FOLLOWER_POLL if deadline is None else deadline - time.monotonic()
        if seconds < 0:
            raise _timeout(work)
        event = work.waiter()
        event.wait(min(_FOLLOWER_POLL, seconds))
        if not work.complete:
            event.clear()

    # -- both ----------------------------------------------------------------------------------

    def _try_step(self) -> bool:
        me, stepping = object(), self._stepping
        try:  # like _unless_taken, but without its call: waiting threads do this all the time
            if stepping.setdefault(0, me) is not me or not self._stepper.step():
                return False
        finally:
            try:
                if stepping[0] is me:
                    del stepping[0]
            except KeyError:
                pass
        self._steps += 1
        if not self._steps % _CHECK_STEPS and time.monotonic() - self._checked > _CHECK_EVERY:
            self.check_peers(time.monotonic())
        return True

    def _sleep(self, now: float, backoff: float) -> float:
        """Sleep until something may have changed. Returns the next backoff."""
        if now - self._checked > _CHECK_EVERY:
            self.check_peers(now)
        limit = self._stepper.sets.backoff_until() - now
        event = self._stepper.sets.event_count
        if event is None and self._stepper.context.in_transit:
            time.sleep(_TRANSIT_SLEEP)
            return backoff
        if event is None:
            time.sleep(min(backoff, limit) if limit > 0 else backoff)
            return min(backoff * 1.25, 2e-4 if backoff < 2e-4 else 1e-3)
        seen = event.prepare_wait()
        if self._try_step():
            event.cancel_wait()
        else:
            event.wait(seen, min(0.02, limit) if limit > 0 else 0.02)
        return backoff

    def check_peers(self, now: float) -> None:
        """Check the peers unless another thread is in a step."""
        self._checked = now
        _unless_taken(self._stepping, self._stepper.check_peers)

    def exclusively(self, call: Callable[..., object], *arguments: Any, end: bool = False) -> bool:
        """Make a call while no other thread is in a step. The calling thread must not be in a step.

        If another thread's step takes more than 5 s, the call is skipped. A call that ends the engine
        (``end``) is made anyway, because that step may never finish.

        Returns:
            True if the call was made.
        """
        done: list[bool] = []

        def run() -> None:
            done.append(True)
            call(*arguments)

        limit = time.monotonic() + _STEP_LIMIT
        _unless_taken(self._stepping, run)
        while not done and time.monotonic() < limit:
            time.sleep(1e-4)
            _unless_taken(self._stepping, run)
        if end and not done:
            run()
        return bool(done)

    # -- the engine thread ---------------------------------------------------------------------

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            # Otherwise nothing would start asynchronous work any more.
            self.exclusively(self._stepper.end.fail_by, error, end=True)

    def _run(self) -> None:
        spin_until = 0.0
        backoff = _FIRST_BACKOFF
        while not self._stepper.end.closed:
            now = time.monotonic()
            if self._seconds_to_work(now) > 0:
                self._rest()
                spin_until = 0.0
            elif self._try_step():
                spin_until = 0.0
            elif spin_until == 0.0:
                spin_until, backoff = now + self._spin, _FIRST_BACKOFF
            elif now < spin_until:
                yield_core()
            else:
                backoff = self._sleep(now, backoff)

    def _seconds_to_work(self, now: float) -> float:
        """Return the seconds until the engine thread has work, at most ``_IDLE``. Callers do its work."""
        due = None if self._stepper.callers.waiting else self._stepper.sets.next_due()
        return _IDLE if due is None else min(_IDLE, due - now)

    def _rest(self) -> None:
        self.asleep = True  # before the check: any later submission wakes this thread
        seconds = self._seconds_to_work(time.monotonic())
        if seconds > 0:
            self._wake.wait(seconds)
        self.asleep = False
        self._wake.clear()
        now = time.monotonic()
        if not self._stepper.callers.waiting and now - self._checked >= 0.9 * _CHECK_EVERY:
            self.check_peers(now)

    def join(self) -> None:
        """Wait for the engine thread to exit. The engine must be closed."""
        thread = self._thread
        self.asleep = False
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)


def _timeout(work: Work) -> TimeoutError:
    return TimeoutError(f"'{work.name}' did not complete within the timeout. It is still running.")
