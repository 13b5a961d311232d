"""The agent: supervise one host of a job, either the launcher's own or one reached over ssh or srun.

The agent creates the job's directories, starts mpiexec or the commands that mpiexec needs on this host, and
forwards the ranks' reports and output (wrappers.py). It ends every process of the job and removes the job's
files when the launcher asks for it, when the connection is closed, or when the launcher has been silent for
too long. If the agent is killed, a process that it forked earlier takes over (``Cleanup.fork_backup()``).
Standard library only.

Messages (``host.messages.Frames``) travel over stdin and stdout. From the launcher:
``{"job", ...}`` once; ``{"put": name, "mode"}`` with a file's bytes; ``{"spawn": n, "command" or "argv"}``;
``{"to": connection of a rank, "message"}``; ``{"ping"}``;
``{"clean", "failed", "results"}``; and the messages of tasks.py.
To the launcher: ``{"facts"}``; ``{"ready", "problem", "port"}``; ``{"from": connection, "message"}``;
``{"from", "stream": 0 or 1}`` with bytes (empty at the stream's end); ``{"from", "closed"}``;
``{"output"}`` with bytes; ``{"exited": n, "pid", "code", "time"}``; ``{"died": pid, "name", "signal"}``;
``{"note"}``; ``{"pong"}``; ``{"file": name, "last"}`` with bytes; ``{"cleaned": bool}``.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from ..directories import (
    OUTPUT,
    OWN_DIRECTORY,
    TIMELINE,
    bases,
    free_port,
    host_directory,
    host_shared,
    usable,
)
from ..messages import AGENT_SPEAKS, Frames, watch
from ..system import linux
from ..system.cleanup import Cleanup, make_directories
from . import paths
from .heartbeat import Heartbeats
from .programs import Programs
from .wrappers import Wrappers

_FULL = 4 << 20  # number of unsent bytes above which the ranks' output is left in the pipes
_FULL_LOCAL = 1 << 18
_DRAIN_S = 3.0
_ANSWER_S = 0.5
_SLEPT_S = 2.0  # a longer gap between turns of the event loop means this process was stopped
_RESULT_BYTES = 1 << 20  # chunk size, in bytes, for sending result files
_SET = "Before you start the job, set TMPDIR to a directory that is writable on all hosts"
_RESULT = re.compile(r"result\.\d+\.pkl")
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a shell drops variables with other names


class _Agent:
    """Serves one launcher.

    Args:
        local: On the launcher's own host, the descriptors of rank 0's stdin (-1 for none), of a file to
            lock, and of the connections to the agents on other hosts (``Heartbeats``). Otherwise empty.
    """

    def __init__(self, local: Sequence[int] = ()) -> None:
        self._launcher = Frames(0, 1)
        self._selector = selectors.DefaultSelector()
        self._local = bool(local)
        self._heartbeats = Heartbeats(*local[1:])
        self._wrappers = Wrappers(self._launcher, self._selector, self._on_pid, local[0] if local else -1)
        self._programs = Programs(self._launcher, self._selector)
        self._directory = ""
        self._cleanup: Cleanup | None = None
        self._tasks: Any = None
        self._port = 0  # a free port for MASTER_PORT, or 0 if none is free
        self._heard = self._answered = self._turned = time.monotonic()
        self._timeout: float | None = None  # how long the launcher may be silent, in seconds
        self._full = self._over = False
        self._wake = linux.wake_on_signals()

    def run(self) -> None:
        """Serve until the job is over or the launcher exits, then remove the job from this host."""
        self._selector.register(0, selectors.EVENT_READ, self._from_launcher)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)
        if not self._local:
            from ..system import machine  # not needed on the launcher's own host

            self._launcher.send({"facts": machine.facts()})
        try:
            while not self._over and self._launcher.open and not self._launcher_is_silent():
                self._check_fullness()
                for key, _ in self._selector.select(self._wait_s()):
                    if self._selector.get_map().get(key.fd) is key and not self._over:
                        key.data()
                self._programs.restrict()
                self._launcher.flush()
        finally:
            self._heartbeats.close()
            if self._cleanup and not self._over:
                self._cleanup.run()

    def _wait_s(self) -> float | None:
        if self._programs.restricting is not None:
            return self._programs.restricting
        return self._heartbeats.send() if self._local else 0.5

    def _launcher_is_silent(self) -> bool:
        limit, now = self._timeout, time.monotonic()
        if now - self._turned > _SLEPT_S:  # this process was stopped and may not have read pings
            self._heard = now
        self._turned = now
        return limit is not None and now - self._heard > limit

    def _check_fullness(self) -> None:
        """Send unsent data when the launcher can receive it. Stop reading output while too much is unsent."""
        unsent = self._launcher.unsent
        watch(self._selector, 1, selectors.EVENT_WRITE, self._launcher.flush if unsent else None)
        full = unsent > (_FULL_LOCAL if self._local else _FULL)
        if full != self._full:
            self._full = full
            self._wrappers.hold(full)

    # --- from the launcher ---------------------------------------------------------------------

    def _from_launcher(self) -> None:
        messages, alive = self._launcher.receive()
        self._heard = now = time.monotonic()
        # The launcher's pings queue behind a large file that it is sending. Answer them before they arrive.
        if self._timeout is not None and now - self._answered > _ANSWER_S:
            self._launcher.send({"pong": True})
            self._answered = now
        for message, payload in messages:
            self._handle_message(message, payload)
        if not alive:
            self._launcher.open = False

    def _handle_message(self, message: dict[str, Any], payload: bytes) -> None:
        if "ping" in message:
            self._launcher.send({"pong": message["ping"]})
        elif "to" in message:
            self._wrappers.send(message["to"], message["message"])
        elif "spawn" in message:
            self._spawn(message)
        elif "put" in message:
            self._put(os.path.basename(message["put"]), payload, message.get("mode", 0o600))
        elif "task" in message:
            self._do(message, payload)
        elif "job" in message:
            problem = self._prepare(message)
            self._launcher.send({"ready": True, "problem": problem, "port": self._port})
        elif "clean" in message:
            self._clean(message["failed"], message.get("results", True))

    def _do(self, message: dict[str, Any], payload: bytes) -> None:
        if self._tasks is None:
            from .tasks import Tasks  # imported late, so that its imports do not delay a job's start

            self._tasks = Tasks(self._launcher, self._selector)
        self._tasks.take(message, payload)

    def _prepare(self, message: dict[str, Any]) -> str:
        """Create the job's directories and listen for wrappers. Return an error message, empty on success."""
        cwd, self._timeout = message["cwd"], message["heartbeat_timeout"]
        if not os.path.isdir(cwd):
            return (
                f"directory {cwd} does not exist. Start the job in a directory that exists on all hosts (on "
                "a shared file system, or as a copy), or pass such a directory with --chdir"
            )
        for path in message["needed"]:
            if not os.path.exists(os.path.join(cwd, path)):
                return f"{os.path.join(cwd, path)} does not exist. All hosts need it at this path"
        usable_bases, wrong = usable([*message["bases"], *bases(os.environ)])
        if not usable_bases:
            return f"no directory for temporary files ({wrong}). {_SET}"
        self._directory = host_directory(usable_bases[0], message["job"])
        shared = host_shared(message["job"])
        directories = [directory for directory in (self._directory, shared) if directory]
        self._cleanup = Cleanup(message["job"], directories, time.time(), os.getpid(), self._reap)
        try:
            make_directories(directories, message["job"])
            self._cleanup.fork_backup()
            self._wrappers.listen(os.path.join(self._directory, "s"))
        except OSError as error:
            return f"the job's directory {self._directory} cannot be created: {error.strerror}. {_SET}"
        self._port_lock, self._port = free_port()
        # The launcher's settings override the settings of the login environment on this host.
        settings = {
            name: text.replace(OWN_DIRECTORY, self._directory)
            for name, text in message["environ"].items()
        }
        launcher = message.get("launcher")
        if launcher:
            settings = paths.translated(settings, launcher) | paths.variables(cwd, launcher)
        environ = {**os.environ, **settings, linux.MARKER: message["job"]}
        self._wrappers.environ = {name: environ[name] for name in environ if not _SHELL_NAME.fullmatch(name)}
        self._programs.prepare(environ, cwd, launcher)
        return ""

    def _put(self, name: str, data: bytes, mode: int) -> None:
        descriptor = os.open(os.path.join(self._directory, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    def _spawn(self, message: dict[str, Any]) -> None:
        if self._cleanup:
            self._cleanup.watch()
        self._programs.spawn(message, self._directory)

    def _on_pid(self, pid: int) -> None:
        self._programs.restricting = None  # mpiexec opens its sockets before it starts a rank
        if self._cleanup:
            self._cleanup.note(pid)

    # --- the end -------------------------------------------------------------------------------

    def _reap(self) -> None:
        try:
            os.read(self._wake, 512)
        except BlockingIOError:
            pass
        self._programs.reap()

    def _clean(self, failed: bool, wanted: bool) -> None:
        """End the job on this host: leave nothing behind, and send everything that its ranks have written."""
        results = self._results(wanted and not failed)
        clean = self._cleanup.run(failed) if self._cleanup else True
        self._wrappers.read_rest()
        self._programs.read_rest()
        self._over = True  # from now on, messages only show that the launcher is alive
        for name, file in results:
            data = b"x"
            while data and self._drain(_FULL):
                data = file.read(_RESULT_BYTES)
                self._launcher.send({"file": name, "last": not data}, data)
        self._launcher.send({"cleaned": clean})
        self._drain(0)

    def _results(self, wanted: bool) -> list[tuple[str, BinaryIO]]:
        """Open the files for the launcher before the cleanup removes them. Skip results unless ``wanted``."""
        names = sorted(os.listdir(self._directory)) if os.path.isdir(self._directory) else []
        kept = [name for name in names if name.startswith(TIMELINE) or (wanted and _RESULT.fullmatch(name))]
        for place, _, files in os.walk(os.path.join(self._directory, OUTPUT)):
            kept += [os.path.relpath(os.path.join(place, name), self._directory) for name in files]
        return [(name, open(os.path.join(self._directory, name), "rb")) for name in kept]

    def _drain(self, most: int) -> bool:
        """Wait until at most ``most`` bytes are unsent. Returns False if the launcher stops reading."""
        until = time.monotonic() + _DRAIN_S
        while self._launcher.open and (unsent := self._launcher.unsent) > most:
            readable, _, _ = select.select([0], [1], [], self._heartbeats.send() or 0.1)
            if readable:
                self._from_launcher()
            self._launcher.flush()
            if self._launcher.unsent < unsent:
                until = time.monotonic() + _DRAIN_S
            elif self._local:  # if a local launcher had exited, its pipe would be closed, so it is only slow
                continue
            elif time.monotonic() > until and (self._timeout is None or self._launcher_is_silent()):
                return False
        return self._launcher.open


def main(arguments: list[str]) -> None:
    """Run an agent. ``arguments`` are the descriptors for ``_Agent``, or empty."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A signal to all processes of a user, session or container also reaches the launcher, which decides
        # what to do.
        # Install a handler, because programs started here would inherit ignored signals, but not handlers.
        signal.signal(number, lambda *_: None)
    linux.adopt_orphans()
    # Nothing else may write to the descriptor for messages.
    os.write(1, AGENT_SPEAKS)
    sys.stdout = sys.stderr
    _Agent([int(word) for word in arguments]).run()
    os._exit(0)  # a thread that inspects another process may still be blocked (cleanup.py)
