"""Actors that run on the nodes of a Ray cluster.

The first actor runs the job. On every other node, the actor starts an agent, which connects to the first node
over TCP (tcp.py) instead of ssh. The ranks (ray_rank.py) receive calls from the actor on their machine over a
socket in the job's directory.
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
_VERDICT_S = 6.0  # how long to wait for a job to end after it has lost a rank


class Node:
    """An actor that holds the resources for some ranks. The first actor on each machine serves its ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Connection[Any, Any], threading.Lock]] = {}
        self._outcome: Verdict | int | None = None
        self._over = threading.Event()

    def where(self) -> dict[str, Any]:
        """Return this machine's name and address, and the GPUs that Ray assigned to this actor."""
        import ray

        ip = ray.util.get_node_ip_address()
        return {"host": os.uname().nodename, "ip": ip, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}

    # --- the job -------------------------------------------------------------------------------

    def run_job(
        self, job: str, hosts: Sequence[tuple[str, int]], peers: Mapping[str, Any], ip: str, timeout: float
    ) -> str:
        """Run the job until all ranks have exited. Returns why it failed, or an empty string.

        Args:
            job: Job ID.
            hosts: Host names, each with its number of ranks.
            peers: Actors on the machines, by host name.
            ip: Address at which other machines can reach this one.
            timeout: Seconds within which all ranks must start.
        """
        ranks = sum(slots for _, slots in hosts)
        # Do not forward the environment: the connections to agents are not encrypted, and Ray has already set
        # the job's variables on each machine.
        spec = JobSpec(_COMMAND, ranks=ranks, hosts=hosts, source="Ray", start_timeout=timeout, forward=False)
        try:
            local = frozenset([os.uname().nodename])
            ready = prepare(spec, connect=lambda names, *_: _connect(names, peers, ip), local=local)
            self._outcome = Job(ready, Screen((write_all(1), write_all(2))), id=job).run()
        finally:
            self._over.set()
        return render(self._outcome, ranks) if isinstance(self._outcome, Verdict) else ""

    def start_agent(self, ip: str, port: int, token: bytes) -> None:
        """Start an agent on this machine, connected to the first machine.

        Raises:
            OSError: The first machine cannot be reached at ``ip`` and ``port``.
        """
        with tcp.connect([ip], port, token) as sock:
            fd = sock.fileno()
            subprocess.Popen(bare_command("agent.main"), stdin=fd, stdout=fd, start_new_session=True)

    # --- ranks ---------------------------------------------------------------------------------

    def connect_ranks(
        self, job: str, ranks: Sequence[int], setup: Mapping[str, Any], seconds: float
    ) -> list[int]:
        """Connect to this machine's ranks and send them ``setup``. Returns the unreachable ranks."""
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
        """Call a function on one of this machine's ranks and return the result.

        Raises:
            LaunchError: The function raised an exception, whose traceback is in the message, or the rank
                died.
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
        """Close the connections, so that the ranks here exit. Wait for the job if it runs here."""
        for connection, _ in self._ranks.values():
            connection.close()
        if self._outcome is None:
            self._over.wait(seconds)


def _connect(hosts: Sequence[str], peers: Mapping[str, Any], ip: str) -> list[Remote]:
    """Have the actors on other machines start agents, and accept the agents' connections.

    Raises:
        LaunchError: An agent does not connect.
    """
    import ray

    remotes: list[Remote] = []
    with tcp.listen() as listener:
        listener.settimeout(30.0)
        for host in hosts:
            token = secrets.token_bytes(32)
            started = peers[host].start_agent.remote(ip, listener.getsockname()[1], token)
            sock = None
            while sock is None:  # retry if a process other than the agent connected
                try:
                    sock = tcp.answer(listener.accept()[0], token)
                except TimeoutError:
                    raise LaunchError(f"The agent on host {host} did not connect to {ip}.") from None
            ray.get(started)
            remotes.append(adopt(host, sock))
    return remotes
