"""The launcher's deputy on another host: started over ssh (or srun), it ends when that connection does.

It listens for the supervisors of this host's ranks (rank.py) where the launcher does on its own, passes
on what they report and what the ranks write, starts what mpiexec wants started here, and like the guardian
ends every process of the job and removes its files: when told, when the connection is gone, or when the
launcher has been silent for too long. Standard library only.

Over stdin and stdout go the messages of :class:`launch.messages.Frames`. Launcher to agent: ``{"job", ...}``
once, ``{"put": name}`` with a file's bytes, ``{"spawn": n, "command"}``, ``{"to": rank's connection,
"message"}``, ``{"stdin": connection}`` with bytes, ``{"ping"}``, ``{"pause": bool}``, ``{"clean",
"failed"}``, and what chores.py does. Agent to launcher: ``{"facts"}``, ``{"ready", "problem"}``,
``{"from": connection, "message"}``,
``{"from", "stream": 0 or 1}`` with bytes (none: its end), ``{"from", "closed"}``, ``{"took": connection}``,
``{"said"}`` with bytes, ``{"spawned": n, "code", "time"}``, ``{"died": pid, "name", "signal"}``,
``{"pong"}``, ``{"file": name, "last"}`` with bytes (no bytes: its end), ``{"cleaned": bool}``.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any, BinaryIO

from ..directories import OWN_FOLDER, bases, host_folder, host_shared, usable
from ..messages import AGENT_SPEAKS, Channel, Frames
from ..system import linux, machine
from ..system.cleanup import Cleanup, make_directories
from . import paths

_FULL = 4 << 20  # bytes waiting for the launcher, beyond which the ranks' output is left in its pipes
_DRAIN_S = 3.0
_ANSWER_S = 0.5
_RESULT_BYTES = 1 << 20  # of a result's file in a message
_DAEMON = "mpiexec's daemon"
_DAEMONS = (_DAEMON, "prted", "orted", "hydra", "pmi_proxy")
_SET = "Set TMPDIR, where the job is started, to a directory that can be written on all hosts"
_RESULT = re.compile(r"result\.\d+\.pkl")


class _Connection:
    """A supervisor: its channel, what is read from its rank, and what its rank is given to read."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number, self.channel = number, channel
        self.streams: dict[int, int] = {}  # descriptor -> 0 (stdout) or 1
        self.stdin = -1


class _Agent:
    def __init__(self) -> None:
        self._launcher = Frames(0, 1)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._spawned: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pid, with mpiexec's number
        self._environ: dict[str, str] = {}
        self._cwd = "/"
        self._place: dict[str, str] | None = None  # of the launcher, where ours is another
        self._folder = ""
        self._sweep: Cleanup | None = None
        self._chores: Any = None
        self._heard = self._answered = time.monotonic()
        self._silence: float | None = None
        self._paused = self._full = self._over = False
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        register = self._selector.register
        register(0, selectors.EVENT_READ, self._from_launcher)
        register(self._wake, selectors.EVENT_READ, self._reap)
        self._launcher.send({"facts": machine.facts()})
        try:
            while not self._over and self._launcher.open and not self._launcher_is_silent():
                self._heed_fullness()
                for key, _ in self._selector.select(0.5):
                    if self._selector.get_map().get(key.fd) is key and not self._over:
                        key.data()
                self._launcher.flush()
        finally:  # whatever went wrong, nothing of the job stays here
            if self._sweep and not self._over:
                self._sweep.run()

    def _launcher_is_silent(self) -> bool:
        limit = None if self._paused else self._silence
        return limit is not None and time.monotonic() - self._heard > limit

    def _heed_fullness(self) -> None:
        """Leave output where it is while the launcher takes none; write as soon as it does."""
        unsent = self._launcher.unsent
        self._watch(1, bool(unsent), selectors.EVENT_WRITE, self._launcher.flush)
        full = unsent > _FULL
        if full != self._full:
            self._full = full
            for connection in self._connections.values():
                for descriptor in connection.streams:
                    self._watch_stream(connection, descriptor, not full)

    def _watch(self, descriptor: int, wanted: bool, event: int, action: Any) -> None:
        known = self._selector.get_map().get(descriptor) is not None
        if wanted and not known:
            self._selector.register(descriptor, event, action)
        elif known and not wanted:
            self._selector.unregister(descriptor)

    # --- from the launcher ---------------------------------------------------------------------

    def _from_launcher(self) -> None:
        messages, alive = self._launcher.receive()
        self._heard = now = time.monotonic()
        # Its questions wait behind a large file that it sends: say that there is somebody.
        if self._silence is not None and now - self._answered > _ANSWER_S:
            self._launcher.send({"pong": True})
            self._answered = now
        for message, payload in messages:
            self._obey(message, payload)
        if not alive:
            self._launcher.open = False

    def _obey(self, message: dict[str, Any], payload: bytes) -> None:
        if "ping" in message:
            self._launcher.send({"pong": message["ping"]})
        elif "to" in message:
            self._tell_rank(message)
        elif "stdin" in message:
            self._give(message["stdin"], payload)
        elif "spawn" in message:
            self._spawn(message["spawn"], message["command"])
        elif "pause" in message:
            self._paused = message["pause"]
        elif "put" in message:
            self._put(os.path.basename(message["put"]), payload)
        elif "chore" in message:
            self._do(message, payload)
        elif "job" in message:
            self._launcher.send({"ready": True, "problem": self._prepare(message)})
        elif "clean" in message:
            self._clean(message["failed"])

    def _do(self, message: dict[str, Any], payload: bytes) -> None:
        if self._chores is None:
            from .tasks import Chores  # a job's start does not wait for its imports

            self._chores = Chores(self._launcher, self._selector)
        self._chores.take(message, payload)

    def _prepare(self, message: dict[str, Any]) -> str:
        """Make the job's folders and listen; what is in the way, or ""."""
        self._cwd, self._silence = message["cwd"], message["silence"]
        if not os.path.isdir(self._cwd):
            return (
                f"there is no folder {self._cwd}. Start from a folder that all hosts have, on a shared "
                "file system, or copied; or say which one ranks have there: --chdir DIR"
            )
        for path in message["needed"]:
            if not os.path.exists(os.path.join(self._cwd, path)):
                return f"there is no {os.path.join(self._cwd, path)}; all hosts need it at the same place"
        places, wrong = usable([*message["bases"], *bases(os.environ)])
        if not places:
            return f"no directory for temporary files ({wrong}). {_SET}"
        self._folder = host_folder(places[0], message["job"])
        shared = host_shared(message["job"])
        folders = [folder for folder in (self._folder, shared) if folder]
        self._sweep = Cleanup(message["job"], folders, time.time(), os.getpid(), self._reap)
        try:
            make_directories(folders, message["job"])
            self._sweep.fork_backup()
            self._sweep.watch()
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(os.path.join(self._folder, "s"))
        except OSError as error:
            return f"the job's directory {self._folder} cannot be made: {error.strerror}. {_SET}"
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        # What the launcher says wins over what this host's login has set.
        given = message["environ"]
        given = {name: self._folder if text == OWN_FOLDER else text for name, text in given.items()}
        self._place = message.get("launcher")
        if self._place:
            given = paths.translated(given, self._place) | paths.variables(self._cwd, self._place)
        self._environ = {**os.environ, **given, linux.MARKER: message["job"]}
        return ""

    def _put(self, name: str, data: bytes) -> None:
        descriptor = os.open(os.path.join(self._folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    def _spawn(self, number: int, command: str) -> None:
        """Start what mpiexec would have started through ssh: by the user's shell, in a session of its own."""
        command = command.replace(OWN_FOLDER, self._folder)
        if self._place:
            command = paths.translated_command(command, self._place)
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environ,
            cwd=self._cwd,
            start_new_session=True,
        )
        assert process.stdout
        output = process.stdout.fileno()
        os.set_blocking(output, False)
        self._spawned[process.pid] = number, process
        self._watch(output, True, selectors.EVENT_READ, lambda: self._pass_on(process))

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """What a started command says itself; its ranks' output comes another way."""
        assert process.stdout
        data = os.read(process.stdout.fileno(), 65536) if self._ready(process.stdout.fileno()) else b""
        if data:
            self._launcher.send({"said": True}, data)
        else:
            self._watch(process.stdout.fileno(), False, 0, None)
            process.stdout.close()

    @staticmethod
    def _ready(descriptor: int) -> bool:
        return bool(select.select([descriptor], [], [], 0)[0])

    # --- ranks ---------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(True)
        connection = _Connection(sock.fileno(), Channel(sock))
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._from_rank(connection))

    def _from_rank(self, connection: _Connection) -> None:
        messages, descriptors, alive = connection.channel.receive()
        for message in messages:
            if "pid" in message and self._sweep:
                self._sweep.note(message["pid"])
            self._launcher.send({"from": connection.number, "message": message})
        for which, descriptor in enumerate(descriptors):
            os.set_blocking(descriptor, False)
            connection.streams[descriptor] = which
            self._watch_stream(connection, descriptor, not self._full)
        if not alive:
            self._selector.unregister(connection.channel.sock)
            connection.channel.sock.close()
            self._launcher.send({"from": connection.number, "closed": True})

    def _watch_stream(self, connection: _Connection, descriptor: int, wanted: bool) -> None:
        self._watch(descriptor, wanted, selectors.EVENT_READ, lambda: self._read(connection, descriptor))

    def _read(self, connection: _Connection, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        which = connection.streams[descriptor]
        if not data:
            self._watch(descriptor, False, 0, None)
            del connection.streams[descriptor]
            os.close(descriptor)
        self._launcher.send({"from": connection.number, "stream": which}, data)
        return bool(data)

    def _tell_rank(self, message: dict[str, Any]) -> None:
        connection = self._connections.get(message["to"])
        if connection is None:
            return
        if "go" not in message["message"]:
            connection.channel.send(message["message"])
            return
        if message["message"].pop("stdin", False):
            stdin, connection.stdin = os.pipe()
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        try:
            connection.channel.send_with(message["message"], [stdin])
        except OSError:
            pass  # that it is gone will be seen by reading
        os.close(stdin)

    def _give(self, number: int, data: bytes) -> None:
        """Pass on what the rank is to read; the launcher sends more when that has been taken."""
        connection = self._connections.get(number)
        if connection is None or connection.stdin < 0:
            return
        if not data:
            os.close(connection.stdin)
            connection.stdin = -1
            return
        os.set_blocking(connection.stdin, False)
        self._pour(connection, memoryview(data))

    def _pour(self, connection: _Connection, rest: memoryview) -> None:
        descriptor = connection.stdin
        self._watch(descriptor, False, 0, None)
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it any more
            rest = rest[:0]
        if rest:
            self._watch(descriptor, True, selectors.EVENT_WRITE, lambda: self._pour(connection, rest))
        else:
            self._launcher.send({"took": connection.number})

    # --- processes -----------------------------------------------------------------------------

    def _reap(self) -> None:
        try:
            os.read(self._wake, 512)
        except BlockingIOError:
            pass
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if dead is None:
                    return
                name = linux.name_of(dead.si_pid)
                _, status = os.waitpid(dead.si_pid, 0)
            except ChildProcessError:
                return
            self._ended(dead.si_pid, os.waitstatus_to_exitcode(status), name)

    def _ended(self, pid: int, code: int, name: str) -> None:
        if pid in self._spawned:
            number, process = self._spawned.pop(pid)
            process.returncode = code  # Popen shall not wait for it again
            if process.stdout and not process.stdout.closed and self._ready(process.stdout.fileno()):
                self._pass_on(process)
            self._launcher.send({"spawned": number, "code": code, "time": time.time()})
            if code == 128 + signal.SIGKILL:  # so its shell tells that the daemon was killed
                code, name = -signal.SIGKILL, _DAEMON
        if code < 0 and name.startswith(_DAEMONS):  # else the users' own: what becomes of those is theirs
            self._launcher.send({"died": pid, "name": name, "signal": -code})

    def _clean(self, failed: bool) -> None:
        """The end: nothing of the job is left here, and all that its ranks have written is on its way."""
        results = [] if failed else self._results()
        clean = self._sweep.run(failed) if self._sweep else True
        for connection in list(self._connections.values()):
            for descriptor in list(connection.streams):
                while self._read(connection, descriptor):
                    pass
        self._over = True  # what the launcher says from now on only shows that it is there
        for name, file in results:
            data = b"x"
            while data and self._drain(_FULL):
                data = file.read(_RESULT_BYTES)
                self._launcher.send({"file": name, "last": not data}, data)
        self._launcher.send({"cleaned": clean})
        self._drain(0)

    def _results(self) -> list[tuple[str, BinaryIO]]:
        """What the ranks have left for the launcher, opened: it can be read when the folder is gone."""
        names = sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else []
        found = [name for name in names if _RESULT.fullmatch(name)]
        return [(name, open(os.path.join(self._folder, name), "rb")) for name in found]

    def _drain(self, most: int) -> bool:
        """Wait until no more than `most` bytes are on their way; False if the launcher takes no more."""
        until = time.monotonic() + _DRAIN_S
        while self._launcher.open and (unsent := self._launcher.unsent) > most:
            readable, _, _ = select.select([0], [1], [], 0.1)
            if readable:
                self._from_launcher()
            self._launcher.flush()
            if self._launcher.unsent < unsent:
                until = time.monotonic() + _DRAIN_S
            elif time.monotonic() > until and (self._silence is None or self._launcher_is_silent()):
                return False
        return self._launcher.open


def main(arguments: list[str]) -> None:
    """`arguments`: none."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Whoever ends all of a user's processes politely leaves the order to the launcher. (A handler,
        # since what is ignored stays so in the programs started.)
        signal.signal(number, lambda *_: None)
    linux.adopt_orphans()
    # Nothing else may write where the messages go.
    os.write(1, AGENT_SPEAKS)
    sys.stdout = sys.stderr
    _Agent().run()
    os._exit(0)
