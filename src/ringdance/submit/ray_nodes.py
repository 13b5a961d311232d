"""The actors on the nodes of a Ray cluster: they start agents, and the first one runs the job.

An agent on another node is started by the actor there and connects to the first one by TCP (tcp.py), in place
of ssh. The ranks (ray_rank.py) take calls from their node's actor over a socket in the job's directory.
"""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.agent.paths import bare_command
from ringdance.host.directories import bases, host_directory
from ringdance.host.system import tcp
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import write_all
from ringdance.launch.prepare import prepare
from ringdance.launch.remote.connect import Remote, adopt
from ringdance.launch.spec import JobSpec
from ringdance.submit.ray_rank import address

_COMMAND = [sys.executable, "-m", "ringdance.submit.ray_rank"]
_VERDICT_S = 6.0  # within which a job ends that has lost a rank


class Node:
    """An actor that holds the resources of some ranks; the first on a machine serves all of its ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Connection[Any, Any], threading.Lock]] = {}
        self._outcome: Verdict | int | None = None
        self._over = threading.Event()

    def where(self) -> dict[str, Any]:
        """Return which machine this is, and which of its GPUs this actor has."""
        import ray

        ip = ray.util.get_node_ip_address()
        return {"host": os.uname().nodename, "ip": ip, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}

    # --- the job -------------------------------------------------------------------------------

    def run_job(
        self, job: str, hosts: Sequence[tuple[str, int]], peers: Mapping[str, Any], ip: str, timeout: float
    ) -> str:
        """Run the ranks to their end; return why they failed, or "".

        Args:
            job: its id.
            hosts: machines and their numbers of ranks.
            peers: the actors of the other machines, by host.
            ip: this machine's address for the others.
            timeout: seconds until all ranks must have started.
        """
        ranks = sum(slots for _, slots in hosts)
        # The agents' connections are not encrypted, and on each machine Ray has set the variables of its job.
        spec = JobSpec(
            _COMMAND, ranks=ranks, hosts=hosts, source="Ray", start_timeout=timeout, forward=False
        )
        try:
            local = frozenset([os.uname().nodename])
            ready = prepare(spec, connect=lambda names, *_: _connect(names, peers, ip), local=local)
            self._outcome = Job(ready, Screen((write_all(1), write_all(2))), id=job).run()
        finally:
            self._over.set()
        return render(self._outcome, ranks) if isinstance(self._outcome, Verdict) else ""

    def start_agent(self, ip: str, port: int, token: bytes) -> None:
        """Start an agent on this machine that is connected to the first one's address.

        Raises:
            OSError: it cannot be reached.
        """
        with tcp.connect([ip], port, token) as sock:
            fd = sock.fileno()
            subprocess.Popen(bare_command("agent.main"), stdin=fd, stdout=fd, start_new_session=True)

    # --- ranks ---------------------------------------------------------------------------------

    def connect_ranks(
        self, job: str, ranks: Sequence[int], setup: Mapping[str, Any], seconds: float
    ) -> list[int]:
        """Wait until ranks of this machine listen, and send them `setup`; return those that do not."""
        until, missing = time.monotonic() + seconds, list(ranks)
        directories = [host_directory(base, job) for base in bases(os.environ)]
        while missing and time.monotonic() < until and not self._over.is_set():
            for path in (address(directory, missing[0]) for directory in directories):
                try:
                    connection = Client(path, "AF_UNIX")
                except OSError:
                    continue
                connection.send(dict(setup))
                self._ranks[missing.pop(0)] = connection, threading.Lock()
                break
            else:
                time.sleep(0.02)
        return missing

    def call(self, rank: int, kind: str, payload: bytes) -> Any:
        """Let a rank of this machine do a call; return its result.

        Raises:
            LaunchError: it raised, with its traceback, or it is gone.
        """
        connection, lock = self._ranks[rank]
        host = os.uname().nodename
        with lock:
            try:
                connection.send({"kind": kind, "call": payload})
                answer = pickle.loads(connection.recv_bytes())
            except (OSError, EOFError):
                raise LaunchError(f"rank {rank} on {host} has died{self._why(rank)}") from None
        if "error" in answer:
            raise LaunchError(f"rank {rank} on {host} failed: {answer['error']}\n{answer['traceback']}")
        return answer["value"]

    def _why(self, rank: int) -> str:
        self._over.wait(_VERDICT_S)
        causes = [self._outcome.cause, *self._outcome.others] if isinstance(self._outcome, Verdict) else []
        return next((f": {cause.message}" for cause in causes if cause.rank == rank), "")

    def close(self, seconds: float) -> None:
        """Let the ranks of this machine end, and wait for the job if it runs here."""
        for connection, _ in self._ranks.values():
            connection.close()
        if self._outcome is None:
            self._over.wait(seconds)


def _connect(hosts: Sequence[str], peers: Mapping[str, Any], ip: str) -> list[Remote]:
    """Have the actors on other machines start agents.

    Raises:
        LaunchError: one does not connect.
    """
    import ray

    found: list[Remote] = []
    with tcp.listen() as listener:
        listener.settimeout(30.0)
        for host in hosts:
            token = secrets.token_bytes(32)
            started = peers[host].start_agent.remote(ip, listener.getsockname()[1], token)
            sock = None
            while sock is None:  # another process may have connected
                try:
                    sock = tcp.answer(listener.accept()[0], token)
                except TimeoutError:
                    raise LaunchError(f"host {host}: its agent does not connect to {ip}") from None
            ray.get(started)
            found.append(adopt(host, sock))
    return found
