"""TCP connections between a job's hosts. A shared token authenticates both sides.

The token travels over ssh, never over the connection itself. Standard library only: this runs in agents.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Sequence

_SIZE = 32
_ANSWER_S, _CONNECT_S, _SILENCE_MS = 5.0, 3.0, 20_000


def listen() -> socket.socket:
    """Return a listening socket on any free port, for IPv4 and, if available, also for IPv6."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0))


def connect(addresses: Sequence[str], port: int, token: bytes) -> socket.socket:
    """Connect to the listener with the same token, at the first address that answers.

    Raises:
        OSError: No address answers.
    """
    failures = []
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), _CONNECT_S)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
            continue
        if _authenticate(sock, token, b"connects", b"listens"):
            return _ready(sock)
        sock.close()
        failures.append(f"{address}: another program answers there")
    raise OSError("; ".join(failures) or "the host has no address")


def accept(listener: socket.socket, token: bytes) -> socket.socket | None:
    """Accept a connection. Returns None if the peer does not know the token."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    return answer(sock, token)


def answer(sock: socket.socket, token: bytes) -> socket.socket | None:
    """Authenticate an accepted connection. Closes it and returns None if the peer does not know the token."""
    if _authenticate(sock, token, b"listens", b"connects"):
        return _ready(sock)
    sock.close()
    return None


def _authenticate(sock: socket.socket, token: bytes, own: bytes, peer: bytes) -> bool:
    """Exchange random numbers and sign both. Returns True if the peer signed with the same token.

    Each side also signs its role, so that an attacker cannot send a signature back to its author.
    """
    sock.settimeout(_ANSWER_S)
    try:
        sent = os.urandom(_SIZE)
        sock.sendall(sent)
        received = _exactly(sock)
        sock.sendall(hmac.digest(token, own + sent + received, "sha256"))
        return hmac.compare_digest(_exactly(sock), hmac.digest(token, peer + received + sent, "sha256"))
    except OSError:
        return False


def _exactly(sock: socket.socket) -> bytes:
    """Read exactly ``_SIZE`` bytes.

    Raises:
        OSError: The peer has closed the connection, or does not send enough bytes in time.
    """
    data = b""
    while len(data) < _SIZE:
        chunk = sock.recv(_SIZE - len(data))
        if not chunk:
            raise ConnectionError("the peer closed the connection before it had authenticated itself")
        data += chunk
    return data


def _ready(sock: socket.socket) -> socket.socket:
    """Make a socket non-blocking, and enable keepalives to detect a lost host."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 5), ("KEEPCNT", 3), ("USER_TIMEOUT", _SILENCE_MS)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    return sock
