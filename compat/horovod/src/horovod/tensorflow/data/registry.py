"""Files through which the processes of a tf.data service find each other.

The compute job creates a directory next to its configuration file, on a file system that both jobs share.
Dispatchers and workers register by writing small files into it. Other processes poll for them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ringdance.errors import ArgumentError, RingdanceError

__all__ = ["ComputeClient", "RegistryError", "own_address", "wait_for", "write_whole"]

T = TypeVar("T")

_log = logging.getLogger("ringdance")

_POLL_SECONDS = 0.1
_WARNING_SECONDS = 10.0


class RegistryError(RingdanceError, RuntimeError):
    """The tf.data service cannot be reached."""


def own_address() -> str:
    """Return an IP address of this host in URL form, if possible not the loopback address."""
    try:
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        found = set()
    addresses = sorted(map(ipaddress.ip_address, found), key=lambda one: (one.version, int(one)))
    usable = [one for one in addresses if not one.is_loopback and not one.is_link_local]
    address = str(usable[0]) if usable else "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, with mode 0600."""
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        draft.touch(0o600)
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def wait_for(look: Callable[[], T | None], what: str, seconds: float, advice: str) -> T:
    """Poll until ``look`` returns something other than ``None``. Log a warning after ten seconds.

    Raises:
        TimeoutError: ``what`` did not happen within ``seconds``. The message ends with ``advice``.
    """
    start, warned = time.monotonic(), False
    while (found := look()) is None:
        waited = time.monotonic() - start
        if waited >= seconds:
            raise TimeoutError(f"tf.data service: waited {seconds:g} s for {what}. {advice}")
        if waited > _WARNING_SECONDS and not warned:
            warned = True
            _log.warning("ringdance: tf.data service: waiting for %s.", what)
        time.sleep(_POLL_SECONDS)
    return found


class ComputeClient:
    """Registers dispatchers and workers, and waits for those in other processes.

    Args:
        directory: Directory of the service. The compute job creates it, and removes it when the job ends.
        workers_per_dispatcher: Number of workers per dispatcher.
        timeout: Timeout in seconds for methods that wait.
    """

    def __init__(self, directory: str, workers_per_dispatcher: int, timeout: float = 60.0) -> None:
        self._directory = Path(directory)
        self._workers_per_dispatcher = workers_per_dispatcher
        self._timeout = timeout

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Publish a dispatcher's address. Raises ArgumentError if it already has a different one."""
        known = self._read(f"dispatcher-{dispatcher_id}") or dispatcher_address
        if known != dispatcher_address:
            raise ArgumentError(
                f"tf.data service: dispatcher {dispatcher_id} is registered already, at {known}."
            )
        self._write(f"dispatcher-{dispatcher_id}", dispatcher_address)

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Publish that a worker serves a dispatcher."""
        self._write(f"worker-{dispatcher_id}-{worker_id}", "")

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float | None = None) -> str:
        """Return a dispatcher's address as soon as it is registered. Raises TimeoutError."""
        what = f"dispatcher {dispatcher_id} to be registered"
        return self._wait(lambda: self._read(f"dispatcher-{dispatcher_id}"), what, timeout)

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, timeout: float | None = None
    ) -> None:
        """Return as soon as a dispatcher has all its workers. Raises TimeoutError."""

        def complete() -> bool | None:
            workers = [one for one in self._names() if one.startswith(f"worker-{dispatcher_id}-")]
            return len(workers) >= self._workers_per_dispatcher or None

        self._wait(complete, f"all workers of dispatcher {dispatcher_id}", timeout)

    def shutdown(self) -> None:
        """Ask the workers to exit."""
        self._write("shutdown", "")

    def wait_for_shutdown(self) -> None:
        """Return after any process has called ``shutdown()``, without a timeout."""
        while "shutdown" not in self._names():
            time.sleep(_POLL_SECONDS)

    def _names(self) -> set[str]:
        # Listing makes an NFS client look again. Otherwise it may remember that a file was missing.
        try:
            return set(os.listdir(self._directory))
        except OSError as error:
            raise self._unreachable(error) from error

    def _read(self, name: str) -> str | None:
        return (self._directory / name).read_text() if name in self._names() else None

    def _write(self, name: str, text: str) -> None:
        try:
            write_whole(self._directory / name, text)
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> RegistryError:
        return RegistryError(
            f"tf.data service: its directory {self._directory} cannot be used ({error.strerror}). The "
            "compute job creates it next to its configuration file and removes it when the job ends: check "
            "that the job is running, that the file belongs to it, and that both jobs share the file system."
        )

    def _wait(self, look: Callable[[], T | None], what: str, timeout: float | None) -> T:
        advice = "Check the output of the compute workers. To wait longer, start them with a larger timeout."
        return wait_for(look, what, self._timeout if timeout is None else timeout, advice)
