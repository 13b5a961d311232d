"""How launcher, guardian and wrappers talk: JSON objects, one a line, over unix sockets; stdlib only."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

_BOOT = "import sys;sys.path.append(sys.argv[1]);from launch.{0} import main;main(sys.argv[2:])"


def bare_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs ``launch.<module>.main`` without ``site``, the package or PYTHON* settings.

    Starts in some 20 ms instead of the time that all imports of the package and its ``.pth`` files take.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(module), package, *arguments]


class Channel:
    """One end of a socket that carries JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """False if the other side is gone."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def send_with(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """The same, with open file descriptors for the other process.

        Raises:
            OSError: the other side is gone.
        """
        socket.send_fds(self.sock, [json.dumps(message).encode() + b"\n"], descriptors)

    def receive(self) -> tuple[list[dict[str, Any]], list[int], bool]:
        """What one read brings: messages, descriptors, and whether the other side is still there."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 65536, 8)
        except (BlockingIOError, InterruptedError):
            return [], [], True
        except OSError:
            data, descriptors = b"", []
        *lines, self._held = (self._held + data).split(b"\n")
        return [json.loads(line) for line in lines], list(descriptors), bool(data)
