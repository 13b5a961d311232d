"""Measure the connection between two hosts: one listens, the other sends.

Only a peer that proves to know the token is answered (see launch/system/tcp.py).
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from ringdance.launch.system import tcp

_CHUNK = 1 << 16
_MOST = 512 << 20  # bytes in one measurement


def listen(token: bytes) -> int:
    """Answer peers that know `token` from a thread; return the port."""
    listener = tcp.listen()

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, token), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(connection: socket.socket, token: bytes) -> None:
    """Read 8 bytes with a count and that many bytes more, and answer with one byte, again and again."""
    if tcp.answer(connection, token) is None:
        return
    buffer = bytearray(_CHUNK)
    with connection:
        connection.settimeout(30.0)
        try:
            while True:
                left = int.from_bytes(tcp.exactly(connection, 8), "big")
                while left:
                    left -= connection.recv_into(buffer, min(left, _CHUNK)) or left
                connection.sendall(b"d")
        except OSError:
            return


def measure(addresses: list[str], port: int, token: bytes, seconds: float) -> dict[str, Any]:
    """Connect to the first address that answers; return the bandwidth in bytes/s.

    Returns:
        ``error`` ("" for none), and ``bandwidth`` if `seconds` is not 0.
    """
    try:
        with tcp.connect(addresses, port, token) as connection:
            connection.settimeout(10.0)
            return {"error": "", **_timed(connection, seconds)}
    except OSError as error:
        return {"error": str(error.strerror or error)}


def _send(connection: socket.socket, count: int) -> float:
    """Send `count` bytes and wait for the answer; return the seconds that took."""
    began = time.perf_counter()
    connection.sendall(count.to_bytes(8, "big"))
    block = bytes(_CHUNK)
    for _ in range(count // _CHUNK):
        connection.sendall(block)
    tcp.exactly(connection, 1)
    return time.perf_counter() - began


def _timed(connection: socket.socket, seconds: float) -> dict[str, float]:
    found, count = dict[str, float](), _CHUNK
    while seconds:
        took = _send(connection, count)
        found["bandwidth"] = count / took
        if took >= seconds / 2 or count >= _MOST:
            break
        # As many as should take the whole time, but not all at once: the first are slow.
        count = min(8 * count, max(2 * count, int(count * seconds / took) // _CHUNK * _CHUNK))
    return found
