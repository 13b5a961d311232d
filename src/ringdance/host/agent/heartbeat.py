"""Heartbeats from the launcher's own agent to the agents on other hosts. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from ..messages import Frames

_PING_S = 0.5
_PING = Frames.pack(b'{"ping": true}')


class Heartbeats:
    """Pings other agents even while the launcher is stopped or is waiting for a slow reader.

    Args:
        lock: Descriptor of the lock file. The launcher locks byte n of it while sending a message to agent n.
        connections: Descriptors of the connections to the agents, by number.
    """

    def __init__(self, lock: int = -1, *connections: int) -> None:
        self._lock, self._connections, self._next = lock, connections, 0.0

    def send(self) -> float | None:
        """Ping the agents if a ping is due. Return the seconds until the next one, or None without agents."""
        now = time.monotonic()
        if self._connections and now >= self._next:
            self._next = now + _PING_S
            for byte, connection in enumerate(self._connections):
                # Locking fails while the launcher is sending. Writing fails if the pipe is full or closed.
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                    os.write(connection, _PING)  # short enough to be written either completely or not at all
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, byte)
        return max(0.0, self._next - now) if self._connections else None

    def close(self) -> None:
        """Close this process's copies of the connections. The launcher's own copies stay open."""
        for connection in self._connections:
            os.close(connection)
        self._connections = ()
