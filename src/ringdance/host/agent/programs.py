"""Programs that an agent starts: mpiexec, or its daemons on other hosts. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..directories import OWN_DIRECTORY
from ..messages import Frames, watch
from ..system import linux
from . import paths
from .loopback import restrict

_DAEMONS = ("prted", "orted", "hydra", "pmi_proxy")
_DAEMON_PATH = re.compile(r"(?:^|(?<=;))(?=\"?/[^\s;=]* )")  # start of the daemon's path in the shell command
# Runs a program with SIGHUP, SIGINT and SIGTERM blocked. See Note [Signals to all processes]. Open MPI
# replaces handlers and ignored signals, but leaves blocked signals blocked. A shell unblocks them.
_BLOCK = "import os,signal,sys;signal.pthread_sigmask(0,(1,2,15));os.execv(sys.argv[1],sys.argv[1:])"
_DEAF = [sys.executable, "-I", "-S", "-c", _BLOCK]
_RESTRICT_S = 0.01  # interval between scans for new sockets of mpiexec, until its first rank runs


class Programs:
    """Starts programs, passes on their output, and reports how they end.

    Args:
        launcher: Receives output and reports.
        selector: The agent's event loop.
    """

    def __init__(self, launcher: Frames, selector: selectors.BaseSelector) -> None:
        self._launcher, self._selector = launcher, selector
        # By pid: the launcher's number for the program, and the process.
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._outputs: list[Any] = []
        self._environ: dict[str, str] = {}
        self._cwd = "/"
        self._launcher_paths: Mapping[str, str] | None = None
        self._restricted = 0  # pid
        self.restricting: float | None = None
        """Seconds until ``restrict()`` is due, or None if it is not needed."""

    def prepare(self, environ: dict[str, str], cwd: str, launcher_paths: Mapping[str, str] | None) -> None:
        """Set the programs' environment and directory. ``launcher_paths`` is None if paths do not differ."""
        self._environ, self._cwd, self._launcher_paths = environ, cwd, launcher_paths

    def spawn(self, message: Mapping[str, Any], directory: str) -> None:
        """Start a program in its own session.

        Args:
            message: Contains ``spawn``, the program's number; ``argv``, or ``command`` for the shell, with a
                placeholder for the job's directory; and ``loopback``, True if no other host needs the
                program's sockets.
            directory: The job's directory.
        """
        argv = [*_DEAF, *message.get("argv", ())]
        if "command" in message:
            command = _DAEMON_PATH.sub(f"exec {shlex.join(_DEAF)} ", message["command"], 1)
            command = command.replace(OWN_DIRECTORY, directory)
            if self._launcher_paths:
                command = paths.translated_command(command, self._launcher_paths)
            argv = ["/bin/sh", "-c", command]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=self._environ, cwd=self._cwd, start_new_session=True,
            )
        except OSError as error:
            text = f"ringdance: cannot start {(message.get('argv') or argv)[0]}: {error.strerror}\n"
            self._launcher.send({"output": True}, text.encode())
            self._launcher.send({"exited": message["spawn"], "pid": 0, "code": 127, "time": time.time()})
            return
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self._running[process.pid] = message["spawn"], process
        self._outputs.append(process.stdout)
        action = lambda: self._read(process.stdout)  # noqa: E731
        watch(self._selector, process.stdout.fileno(), selectors.EVENT_READ, action)
        if message.get("loopback"):
            self._restricted, self.restricting = process.pid, _RESTRICT_S

    def restrict(self) -> None:
        """Hide mpiexec's current listening sockets from the network."""
        if self.restricting is not None:
            try:
                restrict(self._restricted)
            except OSError as error:
                self.restricting = None
                what = "mpiexec listens on all of this host's addresses and cannot be bound to loopback"
                self._launcher.send({"note": f"{what}: {error.strerror}"})

    def _read(self, output: Any) -> bool:
        try:
            data = os.read(output.fileno(), 65536)
        except BlockingIOError:
            return False
        if data:
            self._launcher.send({"output": True}, data)
            return True
        watch(self._selector, output.fileno(), 0, None)
        self._outputs.remove(output)
        output.close()
        return False

    def read_rest(self) -> None:
        """Pass on all remaining output."""
        for output in list(self._outputs):
            while self._read(output):
                pass

    def reap(self) -> None:
        """Reap all dead children, including adopted ones. Report the ends of programs and killed daemons."""
        with contextlib.suppress(ChildProcessError):
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                name = linux.name_of(dead.si_pid)
                _, status = os.waitpid(dead.si_pid, 0)
                self._on_exit(dead.si_pid, os.waitstatus_to_exitcode(status), name)

    def _on_exit(self, pid: int, code: int, name: str) -> None:
        if pid in self._running:
            number, process = self._running.pop(pid)
            process.returncode = code  # so that Popen does not wait for it again
            if process.stdout and not process.stdout.closed:
                self._read(process.stdout)
            if pid == self._restricted:
                self.restricting = None
            self._launcher.send({"exited": number, "pid": pid, "code": code, "time": time.time()})
        if code < 0 and name.startswith(_DAEMONS):  # all other processes belong to the user
            self._launcher.send({"died": pid, "name": name, "signal": -code})
