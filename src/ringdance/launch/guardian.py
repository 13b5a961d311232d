"""The guardian: parent of mpiexec and of every orphan of the job, in a session of its own.

It makes the job's folders, starts mpiexec, and ends and cleans everything up when the launcher
says so or is gone, however it went. Started by :mod:`ringdance.launch.job` with one end of a
socket pair. Standard library only.

Launcher to guardian: ``{"job", "folders", "began"}``, then ``{"start": argv, "env", "cwd", "alone": bool}``,
``{"pid": n}`` for each rank, ``{"ping": n}`` for each agent with a file and the connection to that agent,
``{"clean": true, "failed": bool}``.
Guardian to launcher: ``{"ready"}``, ``{"mpiexec": pid}``, ``{"open": why mpiexec's sockets stay open to the
network}``, ``{"ended": wait status}``, ``{"cleaned": bool}``.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import time
from typing import Any

from .agent.loopback import restrict
from .messages import Channel, Frames
from .system import linux
from .system.cleanup import Cleanup, make_directories

_PING_S = 0.5
_PING = Frames.pack({"ping": True})

_LOOK_S = 0.01  # for new sockets of mpiexec, until its first rank runs


class _Guardian:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._mpiexec = 0
        self._alone = False  # mpiexec starts, and no other host needs its sockets
        self._sweep: Cleanup | None = None
        # The byte of the file to lock: the file, the connection.
        self._agents: dict[int, tuple[int, int]] = {}
        self._next_ping = 0.0
        self._wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        open_ = True
        while open_:
            watched = [self._channel.sock.fileno(), self._wake]
            wait = _LOOK_S if self._alone else self._ping()
            readable, _, _ = select.select(watched, [], [], wait)
            if self._alone:
                self._restrict()
            if self._wake in readable:
                os.read(self._wake, 512)
                self._reap()
            if self._channel.sock.fileno() in readable:
                messages, descriptors, open_ = self._channel.receive()
                for message in messages:
                    if "ping" in message:
                        self._agents[message["ping"]] = descriptors[0], descriptors[1]
                        for descriptor in descriptors:
                            os.set_inheritable(descriptor, False)
                    elif not self._obey(message):
                        return
        for _, connection in self._agents.values():
            os.close(connection)  # nothing else holds it open any more: the agents end
        if self._sweep:
            self._sweep.run()

    def _ping(self) -> float | None:
        """Tell the agents that the job goes on, whatever the launcher does; seconds until the next time."""
        now = time.monotonic()
        if self._agents and now >= self._next_ping:
            self._next_ping = now + _PING_S
            for byte, (file, connection) in self._agents.items():
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                except OSError:
                    continue  # the launcher is in the middle of a message
                try:
                    os.write(connection, _PING)  # whole, or not at all: it is short
                except OSError:
                    pass  # much waits to be read there, or the agent is gone
                fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
        return max(0.0, self._next_ping - now) if self._agents else None

    def _obey(self, message: dict[str, Any]) -> bool:
        if "job" in message:
            self._prepare(message)
        elif "start" in message:
            self._start(message)
        elif "pid" in message and self._sweep:
            self._alone = False  # it listens before it starts a rank
            self._sweep.note(message["pid"])
        elif "clean" in message and self._sweep:
            self._channel.send({"cleaned": self._sweep.run(message["failed"])})
            return False
        return True

    def _prepare(self, message: dict[str, Any]) -> None:
        folders = message["folders"]
        self._sweep = Cleanup(message["job"], folders, message["began"], os.getpid(), self._reap)
        problem = ""
        try:
            make_directories(folders, message["job"])
        except OSError as error:
            problem = str(error)
        self._channel.send({"ready": True, "problem": problem})

    def _start(self, message: dict[str, Any]) -> None:
        argv, me = message["start"], os.getpid()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                linux.die_with_parent()
                if os.getppid() != me:
                    os._exit(1)
                # Python ignores SIGPIPE, and an ignored signal stays so for the program started.
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.dup2(2, 1)  # all that it says is the launcher's to judge, wherever it says it
                os.chdir(message["cwd"])
                os.execve(argv[0], argv, message["env"])
            except OSError as error:
                os.write(2, f"ringdance: cannot start {argv[0]}: {error}\n".encode())
            os._exit(127)
        if self._sweep and not self._mpiexec:
            self._sweep.watch()
        self._mpiexec, self._alone = child, message["alone"]
        # The pipes to the launcher must close when mpiexec and the wrappers are gone.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nowhere, descriptor)
        self._channel.send({"mpiexec": child})

    def _restrict(self) -> None:
        try:
            restrict(self._mpiexec)
        except OSError as error:
            self._alone = False
            self._channel.send({"open": error.strerror})

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._mpiexec:
                self._alone = False
                self._channel.send({"ended": os.waitstatus_to_exitcode(status)})


def main(arguments: list[str]) -> None:
    """`arguments`: the descriptor of the socket to the launcher."""
    # Whoever ends all processes of a session or container politely leaves the order to the launcher.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    linux.adopt_orphans()
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    _Guardian(Channel(sock)).run()
    os._exit(0)  # a look at another process may still be waiting (sweep.py)
