"""One end of a measured connection: ``python -m ringdance.tools.link``, started on each host.

It listens on a port of the system's choice, tells it, and then does what standard input says, a JSON line
each: ``{"token": T}`` once, and ``{"to": [ADDRESSES], "port": P, "seconds": S}`` to connect to another end.
Only who shows the token is answered. It ends with its standard input.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import statistics
import sys
import threading
import time
from typing import Any

MARK = "::ringdance-link::"
_CONNECT_S = 3.0
_TOKEN = 64
_PINGS = 40
_CHUNK = 1 << 16


def _tell(words: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(words)}", flush=True)


def listen() -> socket.socket:
    """A listening socket for IPv4 and, where there is IPv6, for both."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0))


def serve(listener: socket.socket, token: bytes) -> None:
    """Answer whoever shows the token, until the process ends."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the other end has closed")
        data += more
    return data


def _answer(connection: socket.socket, token: bytes) -> None:
    with connection:
        try:
            connection.settimeout(30.0)
            if not hmac.compare_digest(_exactly(connection, _TOKEN), token):
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                kind = connection.recv(1)
                if kind == b"p":
                    connection.sendall(b"p")
                elif kind == b"d":
                    left, buffer = int.from_bytes(_exactly(connection, 8), "big"), bytearray(_CHUNK)
                    while left:
                        left -= connection.recv_into(buffer, min(left, _CHUNK)) or left
                    connection.sendall(b"d")
                else:
                    return
        except OSError:
            return


def measure(to: list[str], port: int, token: bytes, seconds: float) -> dict[str, Any]:
    """Connect to the first address that answers; latency (half a round trip, s), bandwidth (bytes/s)."""
    errors = []
    for address in to:
        try:
            with socket.create_connection((address, port), _CONNECT_S) as connection:
                connection.settimeout(10.0)
                return {"address": address, "error": "", **_timed(connection, token, seconds)}
        except OSError as error:
            errors.append(f"{address}: {error.strerror or error}")
    return {"error": "; ".join(errors) or "it has no address"}


def _timed(connection: socket.socket, token: bytes, seconds: float) -> dict[str, float]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        connection.sendall(b"p")
        _exactly(connection, 1)
        times.append(time.perf_counter() - began)
    found = {"latency": statistics.median(times) / 2}
    count, block = _CHUNK, bytes(_CHUNK)
    while seconds:
        began = time.perf_counter()
        connection.sendall(b"d" + count.to_bytes(8, "big"))
        for _ in range(count // _CHUNK):
            connection.sendall(block)
        _exactly(connection, 1)
        took = time.perf_counter() - began
        found["bandwidth"] = count / took
        if took >= seconds / 2 or count >= 512 << 20:
            break
        # As many as should take the whole time, but not all at once: the first are slow.
        count = min(8 * count, max(2 * count, int(count * seconds / took) // _CHUNK * _CHUNK))
    return found


def main() -> None:
    """Serve, and do what standard input says."""
    listener = listen()
    _tell({"port": listener.getsockname()[1]})
    token = b""
    for line in sys.stdin:
        words = json.loads(line)
        if "token" in words:
            token = words["token"].encode()
            threading.Thread(target=serve, args=(listener, token), daemon=True).start()
        else:
            try:
                _tell(measure(words["to"], words["port"], token, words["seconds"]))
            except OSError as error:
                _tell({"error": f"the connection broke: {error}"})
    os._exit(0)


if __name__ == "__main__":
    main()
