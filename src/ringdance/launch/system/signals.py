"""Signals to the launcher, handled in its loop instead of at any moment."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
PAUSING = (signal.SIGTSTP,)


class Signals:
    """Catches the signals of :data:`STOPPING`, :data:`PASSED_ON` and :data:`PAUSING` from now on.

    Only the main thread can: elsewhere (``ringdance.run`` from a thread) nothing is caught.
    """

    def __init__(self) -> None:
        self._caught: list[int] = []
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._sockets = read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        numbers = (*STOPPING, *PASSED_ON, *PAUSING)
        self._former = {number: signal.signal(number, self._catch) for number in numbers}
        self._descriptor = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)

    @property
    def wakes(self) -> socket.socket | None:
        """Becomes readable when a signal has come."""
        return self._sockets[0] if self._sockets else None

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        if self._sockets:
            try:
                self._sockets[0].recv(4096)
            except BlockingIOError:
                pass
        caught, self._caught = self._caught, []
        return caught

    def restore(self) -> None:
        """Handle signals as before."""
        if self._sockets is None:
            return
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for end in self._sockets:
            end.close()
        self._sockets = None
