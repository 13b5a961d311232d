"""A rank of a world on Ray: it takes calls from its node's actor, one after the other, and answers.

Messages are pickles with their length in front (8 bytes, network order). The actor's first one holds what the
rank is to know of the caller: variables, ``sys.path`` and folder; each other one is a call. mpiexec starts it
as ``python -m ringdance.cluster.ray_rank``; the variable RAY_RINGDANCE_SOCKET names the actor's socket.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import sys
import threading
import traceback
from typing import Any

SOCKET = "RAY_RINGDANCE_SOCKET"


def send(sock: socket.socket, message: Any) -> None:
    """Send one message."""
    import cloudpickle

    data = cloudpickle.dumps(message)
    sock.sendall(struct.pack("!Q", len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Receive one message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = struct.unpack("!Q", _exactly(sock, 8))
    return pickle.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = sock.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def main() -> None:
    """Serve calls until the actor closes the connection, in a child whose end this process reports."""
    from ringdance.launch.agent.rank import place
    from ringdance.launch.system.linux import die_with_parent

    die_with_parent()
    child = os.fork()
    if child:
        _report(child, place(os.environ)["RANK"])
    die_with_parent()
    where = place(os.environ)
    for name, value in where.items():
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = str(value)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ[SOCKET])
    send(sock, {"rank": where["RANK"], "size": where["SIZE"], "pid": os.getpid()})
    setup = receive(sock)
    os.environ.update(setup["environ"])
    sys.path[:] = setup["path"] + [entry for entry in sys.path if entry not in setup["path"]]
    if os.path.isdir(setup["folder"]):
        os.chdir(setup["folder"])
    instance: list[Any] = [None]
    busy = threading.Event()
    threading.Thread(target=_end_with_actor, args=(sock, busy), daemon=True).start()
    while True:
        busy.clear()
        try:
            call = receive(sock)
        except (EOFError, ConnectionResetError):
            return
        busy.set()
        try:
            answer = {"value": _do(call, instance)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            send(sock, answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # the value cannot travel
            send(sock, {"error": f"the result cannot be pickled: {error}", "traceback": ""})


def _report(child: int, rank: int) -> None:
    """Wait for the rank's end, report it to the actor, and end in the same way."""
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(os.environ[SOCKET])
            send(sock, {"rank": rank, "pid": child, "ended": code})
    except OSError:
        pass  # the actor is gone
    os._exit(code if code >= 0 else 128 - code)


def _end_with_actor(sock: socket.socket, busy: threading.Event) -> None:
    """End this rank if its actor goes during a call: nobody wants the result, and others may wait for it."""
    poll = select.poll()
    poll.register(sock, 0)  # its end only
    poll.poll()
    if busy.is_set():
        os._exit(1)


def _do(call: dict[str, Any], instance: list[Any]) -> Any:
    """Make the instance, call a function with it, or call a function."""
    function, args, kwargs = pickle.loads(call["call"])
    if call["kind"] == "make":
        instance[0] = function(*args, **kwargs)
        return None
    if call["kind"] == "execute":
        return function(instance[0])
    return function(*args, **kwargs)


if __name__ == "__main__":
    main()
