"""The progress engine: decides which thread steps the engine, and waits for progress.

One step advances the engine as far as possible without blocking. A thread that waits for a Work makes the
steps itself, so a lone operation does not need another thread. For asynchronous operations, the engine thread
makes the steps, but it rests while callers wait. No thread sleeps during a step. If several callers wait,
one of them leads and makes the steps, and the others follow.

A waiting thread first yields the core for some microseconds, then sleeps: on the event count if all peers are
on this host, otherwise for increasing intervals.
"""

from __future__ import annotations

import threading
import time

from ringdance.core.request import Work
from ringdance.core.stepping import Stepper
from ringdance.core.transport.eventcount import yield_core

_IDLE = 0.1
_FOLLOWER_POLL = 0.02  # threads waiting for the same Work share one event, so followers must poll
_TRANSIT_SLEEP = 1e-4  # short, because MPI moves data between hosts only while it is being called
_FIRST_BACKOFF = 5e-5


class ProgressEngine:
    """Steps one engine, on waiting threads and on the engine thread.

    Attributes:
        asleep: True while the engine thread is resting, so that new work must wake it.

    Args:
        stepper: Makes the steps.
        spin_seconds: Seconds to poll before sleeping.
    """

    def __init__(self, stepper: Stepper, spin_seconds: float) -> None:
        self._stepper = stepper
        self._spin = spin_seconds
        self._leading: dict[int, object] = {}
        self._wake = threading.Event()
        self.asleep = False
        self._thread: threading.Thread | None = None

    def start_thread(self, name: str) -> None:
        """Start the engine thread. The engine must be fully constructed."""
        self._thread = threading.Thread(target=self._thread_main, name=name, daemon=True)
        self._thread.start()

    # -- callers -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the engine thread if it is resting, so that it looks for work."""
        if self.asleep:
            self.asleep = False
            self._wake.set()

    def wait(self, work: Work, timeout: float | None) -> None:
        """Block until ``work`` is done. Raises TimeoutError.

        One of the waiting threads leads: it steps the engine until its own Work is done. The others follow.
        """
        began = time.monotonic()
        work.waited_since = work.waited_since or began
        deadline = None if timeout is None else began + timeout
        me, leading, stepper = object(), self._leading, self._stepper
        try:  # Note [Interrupts]
            while not work.complete and leading.setdefault(0, me) is not me:
                self._follow(work, deadline)
                began = time.monotonic()
            if work.complete:
                return
            spin_until, backoff = began + self._spin, _FIRST_BACKOFF
            while not work.complete:
                if stepper.step():
                    spin_until = 0.0
                    continue
                now = time.monotonic()
                if spin_until == 0.0:
                    spin_until, backoff = now + self._spin, _FIRST_BACKOFF
                if deadline is not None and now > deadline and not work.complete:
                    raise _timeout(work)
                if now < spin_until:
                    yield_core()
                elif stepper.end.closed:  # a Work that is not done by now will never complete
                    if not stepper.try_exclusively(stepper.end.abandon, work):
                        time.sleep(1e-3)
                elif not work.complete:  # another thread's step may have completed it
                    backoff = self._sleep(now, backoff)
            recorder, waited = stepper.context.recorder, time.monotonic() - began
            recorder.waited += waited
            if recorder.detail:
                recorder.wait(work, waited)
        finally:
            try:
                if leading[0] is me:
                    del leading[0]
            except KeyError:
                pass

    def caller_left(self) -> None:
        """Wake another caller, or the engine thread, to take over from a caller that has left."""
        if waiting := self._stepper.callers.waiting:
            for work in list(waiting.values()):
                if not work.complete:
                    work.waiter().set()
                    return
        if self.asleep and self._stepper.sets.next_due() is not None:
            self.wake()

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

    def _sleep(self, now: float, backoff: float) -> float:
        """Sleep until something may have changed. Returns the next backoff."""
        stepper = self._stepper
        stepper.check_peers_if_due(now)
        limit = stepper.sets.backoff_until() - now
        event = stepper.sets.event_count
        if event is None and stepper.context.in_transit:
            time.sleep(_TRANSIT_SLEEP)
            return backoff
        if event is None:
            time.sleep(min(backoff, limit) if limit > 0 else backoff)
            return min(backoff * 1.25, 2e-4 if backoff < 2e-4 else 1e-3)
        seen = event.prepare_wait()
        if stepper.step():
            event.cancel_wait()
        else:
            event.wait(seen, min(0.02, limit) if limit > 0 else 0.02)
        return backoff

    # -- the engine thread ---------------------------------------------------------------------

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            # The engine must fail, because asynchronous requests would never start without this thread.
            self._stepper.exclusively(self._stepper.end.fail_by, error, end=True)

    def _run(self) -> None:
        spin_until = 0.0
        backoff = _FIRST_BACKOFF
        while not self._stepper.end.closed:
            now = time.monotonic()
            if self._seconds_to_work(now) > 0:
                self._rest()
                spin_until = 0.0
            elif self._stepper.step():
                spin_until = 0.0
            elif spin_until == 0.0:
                spin_until, backoff = now + self._spin, _FIRST_BACKOFF
            elif now < spin_until:
                yield_core()
            else:
                backoff = self._sleep(now, backoff)

    def _seconds_to_work(self, now: float) -> float:
        """Return the seconds until the engine thread has work, at most ``_IDLE``.

        While callers are waiting, they do that work instead.
        """
        due = None if self._stepper.callers.waiting else self._stepper.sets.next_due()
        return _IDLE if due is None else min(_IDLE, due - now)

    def _rest(self) -> None:
        self.asleep = True  # set before the check, so that any later submission wakes this thread
        seconds = self._seconds_to_work(time.monotonic())
        if seconds > 0:
            self._wake.wait(seconds)
        self.asleep = False
        self._wake.clear()
        if not self._stepper.callers.waiting:
            self._stepper.check_peers_if_due(time.monotonic())

    def join(self) -> None:
        """Wait for the engine thread to exit. The engine must be closed."""
        thread = self._thread
        self.asleep = False
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)


def _timeout(work: Work) -> TimeoutError:
    return TimeoutError(
        f"'{work.name}' did not complete within the timeout. It is still running, so you can wait for it "
        "again."
    )
