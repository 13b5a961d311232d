"""The actors on Ray's nodes: one seat for each bundle of resources, and the first of each node is its head.

A head starts processes on its node and speaks with the ranks there. The first node's head runs mpiexec. Where
mpiexec would start its daemon on another host by ssh, it starts ``ray_agent.py`` instead, which hands the
command to this head, and it to the head of the other node, by Ray's own connections.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.cluster.ray_rank import SOCKET, receive, send
from ringdance.errors import LaunchError
from ringdance.launch.cause import Cause, Ended, of_end
from ringdance.launch.mpi import find_mpi

_TOLD_S = 1.0  # within which a rank's wrapper tells how it has ended
_AGENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ray_agent.py")


class Seat:
    """An actor that holds the resources of some ranks."""

    def __init__(self) -> None:
        self._folder = self._shared = ""
        self._ranks: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._peers: Mapping[str, Any] = {}
        self._ended: dict[int, Cause | None] = {}
        self._arrived = threading.Condition()

    def where(self) -> dict[str, Any]:
        """Which machine this is, and which GPUs of it this seat has."""
        import ray

        return {
            "host": os.uname().nodename,
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }

    # --- a head ----------------------------------------------------------------------------------------

    def open(self, setup: Mapping[str, Any]) -> str:
        """Listen for this node's ranks, which get `setup`; the name of the MPI library's family here."""
        self._folder = tempfile.mkdtemp(prefix="ringdance-ray-")
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._shared = tempfile.mkdtemp(prefix="ringdance-ray-", dir=shared)
        # Where several machines (of a test) share a file system, their MPI files must not meet.
        parts = ("btl_sm", "btl_vader", "osc_sm", "osc_rdma")
        own = {f"OMPI_MCA_{part}_backing_directory": self._shared for part in parts}
        setup = {**setup, "environ": {**own, **setup["environ"]}}
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(self._folder, "ranks"))
        listener.listen(1024)
        threading.Thread(target=self._welcome, args=(listener, setup), daemon=True).start()
        return find_mpi().family

    def _welcome(self, listener: socket.socket, setup: Mapping[str, Any]) -> None:
        while True:
            try:
                sock, _ = listener.accept()
                hello = receive(sock)
                if "ended" not in hello:
                    send(sock, setup)
            except (OSError, EOFError):
                continue
            with self._arrived:
                if "ended" in hello:
                    sock.close()
                    host = os.uname().nodename
                    ended = Ended(hello["rank"], host, hello["pid"], hello["ended"], time.time())
                    self._ended[hello["rank"]] = of_end(ended)
                else:
                    self._ranks[hello["rank"]] = (sock, threading.Lock())
                self._arrived.notify_all()

    def _environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
        return {
            **kept,
            "PRTE_MCA_prte_tmpdir_base": self._folder,
            SOCKET: os.path.join(self._folder, "ranks"),
            "RAY_RINGDANCE_AGENT": os.path.join(self._folder, "agent"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_osc": "^ucx",
            "PMIX_MCA_psec": "native",
        }

    def launch(self, hosts: Sequence[tuple[str, int]], peers: Mapping[str, Any]) -> None:
        """Start mpiexec for that many ranks on each host; `peers` are the other hosts' heads by name."""
        self._peers = peers
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(self._folder, "agent"))
        listener.listen(64)
        threading.Thread(target=self._serve_agents, args=(listener,), daemon=True).start()
        mpi = find_mpi()
        ranks = sum(slots for _, slots in hosts)
        options = ["--bind-to", "none", "--map-by", "slot", "--oversubscribe", "--tag-output"]
        options += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl_tcp_links", "4", "--mca", "pml", "ob1"]
        if len(hosts) > 1:
            options += ["--host", ",".join(f"{name}:{slots}" for name, slots in hosts)]
            options += ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", f"{sys.executable} {_AGENT}"]
            options += ["--prtemca", "prte_keep_fqdn_hostnames", "1"]
        if mpi.family != "openmpi":
            options = ["-launcher" if mpi.family == "mpich" else "-bootstrap", "fork"]
        words = [mpi.mpiexec, *options, "-n", str(ranks), sys.executable, "-m", "ringdance.cluster.ray_rank"]
        self._start(words)

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            words, env=self._environ(), start_new_session=True, stdin=subprocess.DEVNULL
        )
        self._processes.append(process)
        return process

    def _serve_agents(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._serve_agent, args=(sock,), daemon=True).start()

    def _serve_agent(self, sock: socket.socket) -> None:
        """An agent wants a command to run on a host; it gets the exit code when that has ended."""
        import ray

        host, command = receive(sock)
        peer = self._peers.get(host)
        code = 255 if peer is None else int(ray.get(peer.start_and_wait.remote(command)))
        try:
            send(sock, code)
        except OSError:
            pass  # mpiexec has ended it

    def start_and_wait(self, command: str) -> int:
        """Run a daemon's command line on this node; its exit code."""
        return self._start(["/bin/sh", "-c", command]).wait()

    def wait_for(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Wait until these ranks have said hello; those that have not."""
        end = time.monotonic() + seconds
        with self._arrived:
            while missing := [rank for rank in ranks if rank not in self._ranks]:
                left = end - time.monotonic()
                if left <= 0 or any(process.poll() is not None for process in self._processes):
                    return missing
                self._arrived.wait(min(left, 0.5))
        return []

    def call(self, rank: int, kind: str, payload: bytes) -> Any:
        """Let a rank of this node do a call, and give its result.

        Raises:
            LaunchError: it raised, with its traceback, or it is gone.
        """
        sock, lock = self._ranks[rank]
        host = os.uname().nodename
        with lock:
            try:
                send(sock, {"kind": kind, "call": payload})
                answer = receive(sock)
            except (OSError, EOFError):
                raise LaunchError(f"rank {rank} on {host} has died{self._why(rank)}") from None
        if "error" in answer:
            raise LaunchError(f"rank {rank} on {host} failed: {answer['error']}\n{answer['traceback']}")
        return answer["value"]

    def _why(self, rank: int) -> str:
        with self._arrived:
            self._arrived.wait_for(lambda: rank in self._ended, _TOLD_S)
            cause = self._ended.get(rank)
        return f": {cause.message}" if cause else "; its last output tells why"

    def close(self) -> None:
        """End everything that was started on this node."""
        for sock, _ in self._ranks.values():
            sock.close()
        end = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for folder in filter(None, (self._folder, self._shared)):
            shutil.rmtree(folder, ignore_errors=True)
