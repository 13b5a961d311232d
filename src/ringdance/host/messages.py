"""Messages between the processes of a job. Standard library only.

On one host: JSON objects, one per line, over Unix sockets (``Channel``), which can carry file descriptors.
Between launcher and agents: JSON objects with a payload of bytes, over byte streams (``Frames``).
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

AGENT_SPEAKS = b"\n::ringdance-agent::\n"
"""Written by an agent before its first message."""


def watch(
    selector: selectors.BaseSelector, descriptor: int, event: int, action: Callable[[], Any] | None
) -> None:
    """Register an action for a descriptor, or unregister the descriptor if ``action`` is None. Idempotent."""
    known = selector.get_map().get(descriptor) is not None
    if action and not known:
        selector.register(descriptor, event, action)
    elif known and not action:
        selector.unregister(descriptor)


class Channel:
    """One end of a socket that carries JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Connect to a Unix socket.

        Raises:
            OSError: The socket does not exist, or no process listens on it.
        """
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        return cls(sock)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message and file descriptors to the peer. Returns False if the peer has disconnected."""
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self.sock, [data], list(descriptors)) if descriptors else 0
            self.sock.sendall(data[sent:])
        except OSError:
            return False
        return True

    def receive(self) -> tuple[list[dict[str, Any]], list[int], bool]:
        """Read once. Return complete messages, descriptors, and whether the peer is still connected."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 65536, 8)
        except (BlockingIOError, InterruptedError):
            return [], [], True
        except OSError:
            data, descriptors = b"", []
        *lines, self._held = (self._held + data).split(b"\n")
        return [json.loads(line) for line in lines], list(descriptors), bool(data)


class Frames:
    """Messages with payloads over two descriptors. Sending never blocks, and any thread may send.

    Args:
        read, write: Descriptors, which become non-blocking. They may be the same.
        after: Marker before the first message. Text before it, such as a login banner, goes to ``preamble``.
    """

    _HEAD = struct.Struct("!II")  # sizes of the text and the payload, in bytes
    _MORE = 1 << 31  # flag in the text's size if the payload continues in the next frame, which has no text
    _CHUNK = 1 << 20
    _MOST = 64 << 20  # maximum length in a valid frame

    def __init__(self, read: int, write: int, after: bytes = b"") -> None:
        self.read_fd, self.write_fd, self._after = read, write, after
        self.preamble = b""
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._held = bytearray()
        self._text = b""  # text of a message whose payload is not complete yet
        self._payload: list[bytes] = []
        self._outbox: collections.deque[memoryview] = collections.deque()
        self.unsent = 0
        """Number of bytes that have not been sent yet. Call ``flush()`` to send them."""
        self._lock = threading.Lock()
        self.open = True
        self.shared: tuple[int, int] | None = None
        """File and byte to lock while a message is partly sent, because the local agent also sends pings."""

    def send(self, message: dict[str, Any], payload: bytes = b"") -> bool:
        """Send a message. A large payload is not copied. Returns False if the peer has disconnected."""
        text, view = json.dumps(message).encode(), memoryview(payload)
        with self._lock:
            while len(view) > self._CHUNK:
                self._put(self._HEAD.pack(len(text) | self._MORE, self._CHUNK) + text)
                self._put(view[: self._CHUNK])
                self._put(b"\n")
                text, view = b"", view[self._CHUNK :]
            self._put(self.pack(text, view))
        return self.flush()

    def _put(self, data: bytes | memoryview) -> None:
        self._outbox.append(memoryview(data))
        self.unsent += len(data)

    def flush(self) -> bool:
        """Send what can be sent without blocking. Returns False if the peer has disconnected."""
        with self._lock:
            if self._outbox and self.shared:
                fcntl.lockf(self.shared[0], fcntl.LOCK_EX, 1, self.shared[1])
            while self._outbox and self.open:
                try:
                    sent = os.write(self.write_fd, self._outbox[0][:65536])
                except BlockingIOError:
                    break
                except OSError:
                    self.open = False
                    break
                self.unsent -= sent
                if sent == len(self._outbox[0]):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = self._outbox[0][sent:]
            if self.shared and not (self._outbox and self.open):
                fcntl.lockf(self.shared[0], fcntl.LOCK_UN, 1, self.shared[1])
        return self.open

    @classmethod
    def pack(cls, text: bytes, payload: bytes | memoryview = b"") -> bytes:
        """Encode a message as bytes. ``text`` is its JSON."""
        # The final newline is for srun, which forwards complete lines immediately but holds back other data.
        return cls._HEAD.pack(len(text), len(payload)) + text + payload + b"\n"

    def receive(self) -> tuple[list[tuple[dict[str, Any], bytes]], bool]:
        """Read once. Return complete messages with their payloads, and whether the peer is still connected.

        Raises:
            ValueError: The data is not a valid message.
        """
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        self._held += data
        messages, at = [], 0
        if self._after:
            preamble, mark, rest = self._held.partition(self._after)
            self.preamble = bytes(preamble[-4096:])
            if not mark:
                return [], bool(data)
            self._held, self._after = rest, b""
        while len(self._held) - at >= self._HEAD.size:
            head, payload = self._HEAD.unpack_from(self._held, at)
            text = head & ~self._MORE
            if text + payload > self._MOST:
                raise ValueError(bytes(self._held[at : at + 200]).decode(errors="replace"))
            begin, end = at + self._HEAD.size, at + self._HEAD.size + text + payload
            if len(self._held) <= end:
                break
            self._text = bytes(self._held[begin : begin + text]) or self._text
            self._payload.append(bytes(self._held[begin + text : end]))
            if not head & self._MORE:
                messages.append((json.loads(self._text), b"".join(self._payload)))
                self._text, self._payload = b"", []
            at = end + 1
        del self._held[:at]
        return messages, bool(data)
