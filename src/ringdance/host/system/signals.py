"""Handle the launcher's signals in its event loop."""

from __future__ import annotations

import signal
import socket
import threading

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Catches the signals in ``STOPPING`` and ``PASSED_ON``, except those that are currently ignored.

    Only the main thread can catch signals. If ``ringdance.run`` runs in another thread, none are caught.
    """

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._sockets = read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        numbers = (*STOPPING, *PASSED_ON)
        # Keep ignoring signals that were already ignored when this process started: nohup does this, and so
        # does a shell without job control for programs in the background.
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in heeded}
        self._descriptor = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)

    @property
    def wakes(self) -> socket.socket | None:
        """Socket that becomes readable when a signal has arrived."""
        return self._sockets[0] if self._sockets else None

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call and are handled here."""
        try:
            arrived = self._sockets[0].recv(4096) if self._sockets else b""
        except BlockingIOError:
            return []
        return [number for number in arrived if number in self._handlers]

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        if self._sockets is None:
            return
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for end in self._sockets:
            end.close()
        self._sockets = None
