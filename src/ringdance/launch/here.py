"""The launcher's own host in a running job: guardian, mpiexec, and the supervisors of the ranks here."""

from __future__ import annotations

import os
import selectors
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringdance.launch.agent.paths import bare_command
from ringdance.launch.messages import Channel, Frames
from ringdance.launch.system.cleanup import Cleanup


class Events(Protocol):
    """What a job wants to hear."""

    def here_ready(self, problem: str) -> None:
        """The guardian has made the folders, or could not."""

    def here_clean(self) -> None:
        """The guardian has ended and removed everything."""

    def guardian_lost(self, pid: int, code: int) -> None:
        """The guardian was killed."""

    def mpiexec_said(self, data: bytes) -> None:
        """It has written something."""

    def mpiexec_started(self, pid: int) -> None:
        """It runs."""

    def mpiexec_open(self, why: str) -> None:
        """Its sockets could not be kept away from the network."""

    def mpiexec_ended(self, code: int) -> None:
        """It has ended: exit code or -signal."""

    def supervisor_said(self, channel: Channel, message: dict[str, Any], descriptors: list[int]) -> None:
        """A supervisor has reported; with its first message come its rank's stdout and stderr."""

    def supervisor_gone(self, channel: Channel) -> None:
        """A supervisor's connection has ended."""

    def door_opened(self, host: str, command: str, done: Callable[[int], None]) -> None:
        """mpiexec wants a command started on a host."""


class Here:
    """Starts the guardian at once; call :meth:`launch` when it is ready.

    Args:
        job: its id.
        folders: the job's, made and removed by the guardian; the first is for files.
        began: when the job began, seconds since the epoch.
        selector: the job's loop.
        events: the job.
        environ: of the guardian.
    """

    def __init__(
        self,
        job: str,
        folders: Sequence[str],
        began: float,
        selector: selectors.BaseSelector,
        events: Events,
        environ: Mapping[str, str],
    ) -> None:
        self._job, self._folders, self._began = job, folders, began
        self._selector, self._events = selector, events
        self._pipes: set[int] = set()
        self._pids: list[int] = []
        self._over = self._listens = False
        self._between = -1
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        self._guardian = subprocess.Popen(
            bare_command("guardian", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=out[1],
            stderr=err[1],
            pass_fds=[theirs.fileno()],
            env=environ,
            start_new_session=True,
        )
        theirs.close()
        for read, write in (out, err):
            os.close(write)
            os.set_blocking(read, False)
            self._pipes.add(read)
            selector.register(read, selectors.EVENT_READ, lambda read=read: self._from_mpiexec(read))
        self._channel = Channel(ours)
        self._channel.send({"job": job, "folders": list(folders), "began": began})
        selector.register(ours, selectors.EVENT_READ, self._from_guardian)

    def launch(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        cwd: str,
        files: Mapping[str, tuple[str, int]],
        alone: bool,
    ) -> None:
        """Listen for supervisors and let the guardian start mpiexec; again when that mpiexec has ended.

        Args:
            argv: its command line.
            environ: of it.
            cwd: its directory.
            files: what it needs: texts and permissions by path.
            alone: whether no other host has to reach it.
        """
        if not self._listens:
            self._listen()
            for path, (text, mode) in files.items():
                write_private(path, text.encode(), mode)
        self._channel.send({"start": list(argv), "env": dict(environ), "cwd": cwd, "alone": alone})

    def keep_alive(self, connections: Sequence[Frames]) -> None:
        """Let the guardian send pings to the agents: this process may be stopped, or wait for a reader."""
        if not connections:
            return
        with tempfile.TemporaryFile() as file:
            self._between = os.dup(file.fileno())
        for number, frames in enumerate(connections):
            frames.shared = self._between, number
            self._channel.send_with({"ping": number}, [self._between, frames.write_fd])

    @property
    def socket_path(self) -> str:
        """Where it listens."""
        return os.path.join(self._folders[0], "s")

    def _listen(self) -> None:
        self._listens = True
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.socket_path)
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def note(self, pid: int) -> None:
        """A process that belongs to the job, whatever becomes of it."""
        self._pids.append(pid)
        self._channel.send({"pid": pid})

    def clean(self, failed: bool) -> None:
        """Have everything ended and removed; an event follows."""
        self._channel.send({"clean": True, "failed": failed})  # its loss will be noticed by the loop

    def kill_guardian(self) -> None:
        """It takes too long; its loss follows, and then the launcher cleans up itself."""
        self._guardian.kill()

    def sweep(self) -> None:
        """Clean up in the guardian's place."""
        self._over = True
        sweep = Cleanup(self._job, self._folders, self._began)
        for pid in self._pids:
            sweep.note(pid)
        sweep.run()

    def abandon(self) -> None:
        """An exception goes through the launcher itself: closing the channel makes the guardian clean up."""
        self._channel.sock.close()
        try:
            self._guardian.wait(6.0)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self.sweep()

    def close(self) -> None:
        """Close what the loop does not."""
        for descriptor in self._pipes:
            os.close(descriptor)
        self._guardian.wait()
        if self._between >= 0:
            os.close(self._between)

    # --- what comes ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(True)
        channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._from_supervisor(channel))

    def _from_supervisor(self, channel: Channel) -> None:
        messages, descriptors, alive = channel.receive()
        for message in messages:
            if "door" in message:
                self._events.door_opened(
                    message["door"], message["command"], lambda code: _answer(channel, {"code": code})
                )
            else:
                self._events.supervisor_said(channel, message, descriptors)
        if not alive:
            self._selector.unregister(channel.sock)
            channel.sock.close()
            self._events.supervisor_gone(channel)

    def _from_mpiexec(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if data:
            self._events.mpiexec_said(data)
        else:
            self._selector.unregister(descriptor)
            self._pipes.remove(descriptor)
            os.close(descriptor)

    def _from_guardian(self) -> None:
        messages, _, alive = self._channel.receive()
        for message in messages:
            if "ready" in message:
                self._events.here_ready(message["problem"])
            elif "mpiexec" in message:
                self._events.mpiexec_started(message["mpiexec"])
            elif "open" in message:
                self._events.mpiexec_open(message["open"])
            elif "ended" in message:
                self._events.mpiexec_ended(message["ended"])
            elif "cleaned" in message:
                self._over = True
                self._events.here_clean()
        if not alive:
            self._selector.unregister(self._channel.sock)
            if not self._over:
                self._events.guardian_lost(self._guardian.pid, self._guardian.wait())


def _answer(channel: Channel, message: dict[str, Any]) -> None:
    if channel.sock.fileno() >= 0:  # else it has gone
        channel.send(message)


def door_script(socket_path: str) -> str:
    """A script that mpiexec takes for ssh; see door.py."""
    return f'#!/bin/sh\nexec {shlex.join(bare_command("agent.rsh", socket_path))} "$@"\n'


def write_private(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file that nobody else can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
