"""The monitor process. It reads the rings of this host's ranks, and writes the requested files.

The lowest rank of a host starts it without ``site``, so only the standard library is available. Commands
arrive on stdin, one line of JSON each. ``start`` (``file``, ``detail``, ``anew``), ``stop`` and ``listen``
are answered by a line on stdout. ``connect`` (``addresses``, ``port``, ``token``) and ``metrics`` (see
``Metrics``) get no answer. The monitor on rank 0's host writes the timeline, and the others send it their
records (see ``links``). The process exits when all ranks have left the job or their processes have ended, so
the records of a killed rank are also written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ringdance.core.monitor.links import Follower, Sender
from ringdance.core.monitor.metrics import Metrics
from ringdance.core.monitor.processes import open_ring, warn
from ringdance.core.monitor.tracefile import TraceFile
from ringdance.core.ring import Word
from ringdance.core.transport.eventcount import process_state
from ringdance.host.system import tcp
from ringdance.host.system.machine import networks

_POLL_S = 0.05  # polling interval while a timeline is written; the rings hold several seconds of records
_IDLE_S = 1.0
_OTHERS_S = 2.0  # how long to wait for the last records from other hosts


class Monitor:
    """Reads the rings of the ranks on this host.

    Args:
        pids: Process ids of the ranks.
    """

    def __init__(self, pids: list[int]) -> None:
        self._readers = [reader for pid in pids if (reader := open_ring(pid)) is not None]
        self._alive = {reader.who.pid: reader for reader in self._readers}
        self._selector = selectors.DefaultSelector()
        self._starter = os.getppid()
        self._trace: TraceFile | None = None
        self._sender: Sender | None = None
        self._followers: list[Follower] = []
        self._others = 0  # number of other hosts' monitors that will connect
        self._metrics: Metrics | None = None
        self._interval = _IDLE_S
        self._ending = False  # True once the rank that started this process is leaving
        self._detail: int | None = 0
        self._input = b""
        self._commands: dict[str, Callable[..., Any]] = {
            "start": self._start, "stop": self._stop, "listen": self._listen, "connect": self._connect,
            "metrics": self._metrics_to,
        }  # fmt: skip
        self._watch(0, self._serve)
        for pid in self._alive:
            with contextlib.suppress(OSError, AttributeError):  # not all systems have pidfds
                self._watch(descriptor := os.pidfd_open(pid), partial(self._selector.unregister, descriptor))

    def run(self) -> None:
        """Serve until all ranks have left, then complete the files."""
        # On Linux, each thread has its own priority, and only the serving thread lowers it. The final work
        # runs at normal priority, because the ranks have exited and other programs may keep all cores busy.
        serving = threading.Thread(target=self._serve_ranks)
        serving.start()
        serving.join()
        self._stop(last=True)
        if self._metrics is not None:
            self._metrics.close()

    def _serve_ranks(self) -> None:
        os.nice(19)
        if not self._alive:  # shown only if metrics were requested: stderr is /dev/null otherwise
            os.write(2, b"ringdance: no metrics: the ranks' memory cannot be opened through /proc/PID/fd\n")
        while self._alive:
            busy = self._trace or self._sender or self._followers or self._ending
            self._step(_POLL_S if busy else min(_IDLE_S, self._interval))
            gone = [
                pid for pid, reader in self._alive.items()
                if reader.words[Word.CLOSED] or process_state(pid) == "gone"
            ]  # fmt: skip
            for pid in gone:
                self._alive[pid].ended = True
            self._take()
            if self._trace is not None:
                self._write(self._trace.convert)
            if self._metrics is not None:
                self._metrics.write_if_due()
                self._metrics.leave(gone)
            for pid in gone:
                del self._alive[pid]

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write to the timeline file. If that fails, warn and stop writing."""
        try:
            write(*arguments)
        except OSError as error:
            assert self._trace
            self._warn(f"{self._trace.path}: {error.strerror}. The timeline ends there; the job continues")
            self._trace = None
            self._set_detail_everywhere(0)

    def _warn(self, text: str) -> None:
        warn(self._starter, f"{self._readers[0].who.host}: {text}")

    def _watch(self, descriptor: int, act: Callable[[], Any]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _step(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        for follower in self._followers:
            follower.check_clock()

    # --- commands ------------------------------------------------------------------------------

    def _serve(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self._selector.unregister(0)
            self._ending = True
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            do = command.pop("do")
            try:
                answer = self._commands[do](**command)
            except OSError as error:
                answer = {"error": f"{error.filename or do}: {error.strerror or error}"}
            if do not in ("connect", "metrics"):
                with contextlib.suppress(OSError):
                    os.write(1, json.dumps(answer or {}).encode() + b"\n")

    def _start(self, file: str, detail: int | None, anew: bool) -> None:
        self._stop()
        self._trace = TraceFile(file, anew)
        self._set_detail_everywhere(detail, anew)

    def _metrics_to(self, interval: float, **options: Any) -> None:
        self._metrics = Metrics(self._readers, warn=self._warn, interval=interval, **options)
        self._interval = interval
        # Release the rank's stderr, which would otherwise stay open until this process exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _set_detail(self, detail: int | None, anew: bool = False) -> None:
        """Set ``Word.DETAIL`` of this host's ranks. If None, they set it (see setting ``timeline_steps``)."""
        self._detail = detail
        for reader in self._readers:
            if anew:
                reader.skip()
            if detail is not None:
                reader.words[Word.DETAIL] = detail

    def _set_detail_everywhere(self, detail: int | None, anew: bool = False) -> None:
        self._set_detail(detail, anew)
        for follower in self._followers:
            follower.frames.send({"do": "start", "detail": detail, "anew": anew})

    def _stop(self, last: bool = False) -> None:
        """Complete the file with the records of all hosts.

        If ``last``, wait even for monitors that have not connected yet.
        """
        self._set_detail(0)
        if self._trace is None and self._sender is None:
            return
        self._take()
        if self._sender is not None:
            self._sender.finish(_OTHERS_S)
        for follower in self._followers:
            follower.stopped = not follower.frames.open
            if not last:
                follower.frames.send({"do": "stop"})
        until = time.monotonic() + _OTHERS_S
        expected = self._others if last else len(self._followers)
        while sum(f.stopped for f in self._followers) < expected and time.monotonic() < until:
            self._step(_POLL_S)
        late = [follower for follower in self._followers if last and follower.lacks()]
        lacks = [f"the end of {follower.names()}: {follower.lacks()}" for follower in late]
        if last and (missing := self._others - len(self._followers)) > 0:
            others = "1 other host" if missing == 1 else f"{missing} other hosts"
            lacks.append(f"the ranks on {others}: no monitor has connected from there")
            advice = "Monitors connect by TCP to a port that the system chooses. Check for a firewall."
            self._warn(f"the timeline lacks {lacks[-1]}. {advice}")
        self._take()
        if self._trace is not None:
            self._write(self._trace.close, lacks)
            self._trace = None

    # --- other hosts ---------------------------------------------------------------------------

    def _listen(self, others: int) -> dict[str, Any]:
        """Listen for the monitors of ``others`` hosts. Returns the arguments for their ``connect``."""
        self._others = others
        listener, token = tcp.listen(), secrets.token_bytes(32)
        self._watch(listener.fileno(), lambda: self._accept(listener, token))
        addresses = [address for _, address, _ in networks()]
        return {"addresses": addresses, "port": listener.getsockname()[1], "token": token.hex()}

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        sock = tcp.accept(listener, token)
        if sock is None:
            return
        follower = Follower(sock)
        self._followers.append(follower)
        self._watch(sock.fileno(), lambda: self._receive(follower))
        if self._detail:
            follower.frames.send({"do": "start", "detail": self._detail, "anew": False})

    def _receive(self, follower: Follower) -> None:
        descriptor = follower.sock.fileno()
        if not follower.receive():
            self._selector.unregister(descriptor)

    def _connect(self, addresses: list[str], port: int, token: str) -> None:
        sender = self._sender = Sender(addresses, port, token)
        self._watch(sender.sock.fileno(), lambda: self._obey(sender))

    def _obey(self, sender: Sender) -> None:
        commands, alive = sender.commands()
        for command in commands:
            if command.pop("do") == "start":
                self._set_detail(**command)
            else:
                self._set_detail(0)
                self._take()
                sender.frames.send({"stopped": True})
        if not alive:
            self._selector.unregister(sender.sock)
            self._sender = None
            self._set_detail(0)

    def _take(self) -> None:
        """Take new records from the rings and links, before the ranks overwrite them in the rings."""
        if self._sender is not None:
            for reader in self._readers:
                self._sender.send(reader)
        if self._trace is None:
            return
        for reader in self._readers:
            self._trace.add(reader, *reader.take(), reader.lost)
        for follower in self._followers:
            if follower.clock.known:
                for ring in follower.rings.values():
                    taken, ring.taken = ring.taken, []
                    for first, data, lost in taken:
                        self._trace.add(ring, first, data, lost, follower.clock)
        if self._trace.full and self._detail != 0:
            self._set_detail_everywhere(0)


def main() -> None:
    """Run the monitor for the ranks whose process ids are the arguments."""
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal; this process must outlive the ranks
        signal.signal(number, signal.SIG_IGN)
    Monitor([int(word) for word in sys.argv[1:]]).run()
