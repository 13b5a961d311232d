"""Where the processes of a tf.data service find each other: a small server, and those who ask it.

The job that computes data and the one that trains know only a file with this server's addresses and key.
Dispatchers and workers are registered here; whoever needs them waits here. A message is one JSON object each
way, after both sides have proved that they know the key (``multiprocessing.connection``).
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ringdance.errors import ArgumentError, RingdanceError

__all__ = ["Addresses", "ComputeClient", "ComputeRegistry", "RegistryError", "own_addresses"]

_log = logging.getLogger("ringdance")

Addresses = Mapping[str, Sequence[tuple[str, int]]]
_CONNECT_SECONDS = 5.0
_LONGEST_WAIT = 30.0  # of one request; the client asks again
_GRACE = 10.0


class RegistryError(RingdanceError, RuntimeError):
    """The registry of a tf.data service cannot be reached, or refuses."""


def own_addresses() -> list[str]:
    """Return this host's IP addresses, those that others can reach first, the loopback last."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:
        found = set()
    return [*sorted(one for one in found if not one.startswith("127.")), "127.0.0.1"]


class ComputeRegistry:
    """The server. It answers from when it is made until ``close()``.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many each will have.
        key: a secret that all who ask have.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes) -> None:
        self._dispatchers = dispatchers
        self._workers_per_dispatcher = workers_per_dispatcher
        self._key = key
        self._changed = threading.Condition()
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {number: set() for number in range(dispatchers)}
        self._shut = False
        self._closed = False
        self._socket = socket.create_server(("", 0), backlog=128)
        threading.Thread(target=self._accept, name="compute registry", daemon=True).start()

    @property
    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Where the server can be reached: host name -> (IP address, port)."""
        port = int(self._socket.getsockname()[1])
        return {socket.gethostname(): [(address, port) for address in own_addresses()]}

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass  # macOS: a listening socket is not connected; there closing it is enough
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                continue  # closed, or a connection that broke while it was made
            threading.Thread(
                target=self._serve, args=(Connection(accepted.detach()),), daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                request = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(self._answer(request)).encode())
        except Exception as error:  # one who does not know the key, or has gone: no business of the others
            _log.info("ringdance: compute registry: %s: %s", type(error).__name__, error)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        number = int(request.get("dispatcher", 0))
        if not 0 <= number < self._dispatchers:
            return {"error": f"there is no dispatcher {number}, only 0 to {self._dispatchers - 1}"}
        patience = min(float(request.get("patience", 0.0)), _LONGEST_WAIT)
        with self._changed:
            self._changed.notify_all()
            return self._do(request["do"], number, request, patience)

    def _do(self, what: str, number: int, request: dict[str, Any], patience: float) -> dict[str, Any]:
        if what == "dispatcher":
            known = self._addresses.setdefault(number, str(request["address"]))
            if known != request["address"]:
                return {"error": f"dispatcher {number} is registered already, at {known}"}
            return {"result": True}
        if what == "worker":
            workers = self._workers[number]
            workers.add(int(request["worker"]))
            if len(workers) > self._workers_per_dispatcher:
                workers.discard(int(request["worker"]))
                return {"error": f"dispatcher {number} has all its {len(workers)} workers already"}
            return {"result": True}
        if what == "shutdown":
            self._shut = True
            return {"result": True}
        conditions: dict[str, Callable[[], Any]] = {
            "wait dispatcher": lambda: self._addresses.get(number),
            "wait workers": lambda: len(self._workers[number]) == self._workers_per_dispatcher,
            "wait shutdown": lambda: self._shut,
        }
        return {"result": self._changed.wait_for(conditions[what], patience) or None}


class ComputeClient:
    """Asks the registry.

    Args:
        addresses: as the configuration says; tried in turn.
        key: the secret.
        timeout: seconds for which waiting functions wait.
    """

    def __init__(self, addresses: Addresses, key: bytes, timeout: float = 60.0) -> None:
        self._addresses = [(host, port) for one in addresses.values() for host, port in one]
        self._key = key
        self._timeout = timeout

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Tell where a dispatcher is. Telling the same again is no error, another address is."""
        self._ask({"do": "dispatcher", "dispatcher": dispatcher_id, "address": dispatcher_address})

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Tell that a worker works for a dispatcher."""
        self._ask({"do": "worker", "dispatcher": dispatcher_id, "worker": worker_id})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float | None = None) -> str:
        """Return a dispatcher's address, as soon as it is known. Raises TimeoutError."""
        what = f"dispatcher {dispatcher_id} to be registered"
        return str(self._wait({"do": "wait dispatcher", "dispatcher": dispatcher_id}, what, timeout))

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> None:
        """Return as soon as a dispatcher has all its workers. Raises TimeoutError."""
        what = f"all workers of dispatcher {dispatcher_id}"
        self._wait({"do": "wait workers", "dispatcher": dispatcher_id}, what, timeout)

    def shutdown(self) -> None:
        """Let the workers end."""
        self._ask({"do": "shutdown"})

    def wait_for_shutdown(self) -> None:
        """Return when somebody has called ``shutdown()``; however long that takes."""
        while not self._ask({"do": "wait shutdown", "patience": _LONGEST_WAIT}):
            pass

    def _wait(self, request: dict[str, Any], what: str, timeout: float | None) -> Any:
        patience = self._timeout if timeout is None else timeout
        end = time.monotonic() + patience
        while True:
            left = max(0.0, end - time.monotonic())
            found = self._ask({**request, "patience": left})
            if found is not None:
                return found
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"tf.data service: waited {patience:g} s for {what}. Do the compute workers run? Their "
                    "output says what they wait for; a larger timeout is set where the workers are started."
                )

    def _ask(self, request: dict[str, Any]) -> Any:
        problems = []
        for host, port in self._addresses:
            try:
                answer = self._ask_at(host, port, request)
            except Exception as error:  # refused, unreachable, or somebody else's port
                problems.append(f"{host}:{port}: {type(error).__name__}: {error}")
                continue
            if "error" in answer:
                raise ArgumentError(f"tf.data service: {answer['error']}.")
            return answer["result"]
        tried = "; ".join(problems)
        raise RegistryError(
            f"tf.data service: its registry cannot be reached ({tried}). It runs on rank 0 of the compute "
            "workers: see whether they run, and whether the configuration file is theirs."
        )

    def _ask_at(self, host: str, port: int, request: dict[str, Any]) -> dict[str, Any]:
        with socket.create_connection((host, port), _CONNECT_SECONDS) as plain:
            plain.settimeout(None)
            connection = Connection(plain.detach())
        with connection:
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
            connection.send_bytes(json.dumps(request).encode())
            if not connection.poll(float(request.get("patience", 0.0)) + _GRACE):
                raise TimeoutError("no answer")
            answer: dict[str, Any] = json.loads(connection.recv_bytes())
            return answer
