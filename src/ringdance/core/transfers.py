"""Messages between two ranks, which are sent without an agreement among the members of a process set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ringdance.errors import ProcessSetRemovedError

_LAST_S = 1.0  # seconds to wait for messages that a rank sent before leaving its group


class Transfer:
    """A message between two ranks. Can be used like a ``Work`` of the engine.

    Args:
        engine: This rank's ``Engine``.
        pending: The transport's ``Transfer``.
        state: The process set's ``ProcessSetState``.
        verb: "send" or "receive".
        nbytes: Size of the message.
        rank: The other rank, as a rank in the set, or None for any rank.
        tag: Tag of the message.

    Attributes:
        name: Name of the message, equal on both ranks unless this rank receives from any rank.
        peers: The global ranks that this rank waits for.
        complete: True once a wait has ended, after which the stall check ignores the message.
    """

    def __init__(
        self, engine: Any, pending: Any, state: Any, verb: str, nbytes: int, rank: int | None, tag: int
    ) -> None:
        self._engine, self._pending, self.state = engine, pending, state
        others = tuple(member for member in state.members if member != engine.rank)
        self.peers = others if rank is None else (state.members[rank],)
        ends = ["any rank" if rank is None else f"rank {self.peers[0]}", f"rank {engine.rank}"]
        source, target = ends if verb == "receive" else ends[::-1]
        self.name = f"message of {nbytes} bytes from {source} to {target}" + (f", tag {tag}" if tag else "")
        self.result: list[Any] = []
        self.received_splits = self.error = None
        self.complete, self.waited_since, self.thread = False, 0.0, 0
        self._begun, self._is_done = time.monotonic(), False
        self._testing = threading.Lock()  # two threads that test the same MPI request would free it twice

    @property
    def source(self) -> int:
        return int(self._pending.source)

    def done(self) -> bool:
        """Return True if the message has been sent or received. Never blocks.

        Raises:
            RuntimeError: The transfer failed, the other rank has left the group without making the matching
                call, or the engine has ended.
        """
        if self._is_done or not self._testing.acquire(blocking=False):
            return self._is_done
        try:
            self._is_done = bool(self._pending.test())
        except Exception as error:
            text = f"'{self.name}' failed: {error}. Check that both ranks pass tensors of the same length."
            raise RuntimeError(text) from error
        finally:
            self._testing.release()
        if not self._is_done:
            if self._engine.closed:
                raise self._engine.end.error()
            left = self.state.left_since(self.peers) if self.state.left else time.monotonic()
            if max(left, self._begun) < time.monotonic() - _LAST_S:
                raise ProcessSetRemovedError(f"'{self.name}': {self.state.removal()}")
        return self._is_done

    def when_done(self, call: Callable[[], None]) -> None:
        """Do nothing, because a message completes only when ``done`` is called."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the message is sent or received. The stall check covers this wait.

        Raises:
            ProcessSetRemovedError: The other rank has destroyed the group without making the matching call.
        """
        began, waits, me = time.monotonic(), self._engine.callers.transfers, object()
        self.complete, self.waited_since, self.thread = False, began, threading.get_ident()
        try:
            waits[me] = self
            self._poll(None if timeout is None else began + timeout)
        finally:
            self.complete = True
            waits.pop(me, None)
            self._engine.callers.messages += 1
            self._engine.recorder.waited += time.monotonic() - began

    def _poll(self, until: float | None) -> None:
        pause = 0.0
        while not self.done():
            if until is not None and time.monotonic() > until:
                raise TimeoutError(
                    f"'{self.name}' did not complete within the timeout. It is still running, so you can "
                    "wait for it again."
                )
            time.sleep(pause)
            pause = min(1e-3, pause + 1e-5)
