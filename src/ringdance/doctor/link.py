"""One end of a measured connection: ``python -m ringdance.doctor.link``, started on each host.

It listens on a port of the system's choice, tells it, and then does what standard input says, a JSON line
each: ``{"token": T}`` once, and ``{"to": [ADDRESSES], "port": P, "seconds": S}`` to connect to another end.
Only who proves to know the token is answered (see launch/tcp.py). It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from typing import Any

from ringdance.launch.remote.tcp import answer, connect, listen

MARK = "::ringdance-link::"
_PINGS = 40
_CHUNK = 1 << 16


def _tell(words: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(words)}", flush=True)


def serve(listener: socket.socket, token: bytes) -> None:
    """Answer whoever knows the token, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
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
    if answer(connection, token) is None:
        return
    with connection:
        try:
            connection.settimeout(30.0)
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
            with connect([address], port, token) as connection:
                connection.settimeout(10.0)
                return {"address": address, "error": "", **_timed(connection, seconds)}
        except OSError as error:
            text = str(error.strerror or error)
            errors.append(text if text.startswith(f"{address}: ") else f"{address}: {text}")
    return {"error": "; ".join(errors) or "it has no address"}


def _timed(connection: socket.socket, seconds: float) -> dict[str, float]:
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
