"""The agent's side of the connections to this host's wrappers (rank.py): reports, and the ranks' output.

Standard library only.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from ..messages import Channel, Frames, watch


class _Connection:
    """The channel to a wrapper (or rsh.py), and its rank's output."""

    def __init__(self, channel: Channel) -> None:
        self.number, self.channel = channel.fileno(), channel
        self.streams: dict[int, int] = {}  # descriptor -> 0 (stdout) or 1 (stderr)


class Wrappers:
    """Accepts connections from wrappers, and passes messages between them and the launcher.

    Args:
        launcher: Receives reports and output.
        selector: The agent's event loop.
        on_pid: Called with the pid of each rank.
        stdin: Descriptor of rank 0's stdin, or -1 if there is none.
    """

    def __init__(
        self, launcher: Frames, selector: selectors.BaseSelector, on_pid: Callable[[int], None],
        stdin: int = -1,
    ) -> None:
        self._launcher, self._selector, self._on_pid, self._stdin = launcher, selector, on_pid, stdin
        self._connections: dict[int, _Connection] = {}
        self._held = False
        self.environ: dict[str, str] = {}
        """Variables that a shell may drop. A shell starts mpiexec's daemon, and may start the wrappers."""

    def listen(self, path: str) -> None:
        """Listen on a Unix socket.

        Raises:
            OSError: The socket cannot be created.
        """
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(True)
        connection = _Connection(Channel(sock))
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: _Connection) -> None:
        messages, descriptors, alive = connection.channel.receive()
        for message in messages:
            if "pid" in message:
                self._on_pid(message["pid"])
            self._launcher.send({"from": connection.number, "message": message})
        for which, descriptor in enumerate(descriptors):
            os.set_blocking(descriptor, False)
            connection.streams[descriptor] = which
            self._watch(connection, descriptor)
        if not alive:
            self._selector.unregister(connection.channel.sock)
            connection.channel.sock.close()
            self._launcher.send({"from": connection.number, "closed": True})

    # --- output --------------------------------------------------------------------------------

    def _watch(self, connection: _Connection, descriptor: int) -> None:
        action = None if self._held else lambda: self._read(connection, descriptor)
        watch(self._selector, descriptor, selectors.EVENT_READ, action)

    def hold(self, held: bool) -> None:
        """Stop or resume reading output. While reading is stopped, output stays in the pipes."""
        self._held = held
        for connection in self._connections.values():
            for descriptor in connection.streams:
                self._watch(connection, descriptor)

    def _read(self, connection: _Connection, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        which = connection.streams[descriptor]
        if not data:
            watch(self._selector, descriptor, 0, None)
            del connection.streams[descriptor]
            os.close(descriptor)
        self._launcher.send({"from": connection.number, "stream": which}, data)
        return bool(data)

    def read_rest(self) -> None:
        """Pass on all remaining output. The processes that could write more no longer exist."""
        for connection in self._connections.values():
            for descriptor in list(connection.streams):
                while self._read(connection, descriptor):
                    pass

    # --- from the launcher ---------------------------------------------------------------------

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Send a message to a wrapper. The message that starts its rank carries the rank's stdin."""
        connection = self._connections.get(number)
        if connection is None or connection.channel.fileno() < 0:
            return
        if "go" not in message:
            connection.channel.send(message)
            return
        # Do not let mpiexec forward stdin: with Open MPI, not every program would see the end of its input.
        if message["go"]["RANK"] == 0 and self._stdin >= 0:
            stdin, self._stdin = self._stdin, -1
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        connection.channel.send({**message, "environ": self.environ}, [stdin])
        os.close(stdin)
