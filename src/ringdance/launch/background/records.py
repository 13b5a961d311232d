"""Keep records of jobs that run in the background: a private directory for each.

``job.json`` holds the :class:`Record`, ``log`` the job's output: a line of JSON ``[STREAM, TEXT]`` for each
write, STREAM being 1 for stdout and 2 for stderr.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

from ringdance.errors import LaunchError
from ringdance.job_files import NO_FORMAT, check_regular, typed
from ringdance.launch.output.stream import Sink, write_all
from ringdance.launch.system import linux
from ringdance.launch.system.machine import identity, in_home

_KEPT = 50  # records of jobs that have ended
_OLD_S = 90 * 86400.0
_SIZE = 4096  # a record is filled up with blanks: its end needs no more room on the disk than its beginning
_SHORTEST = 4  # digits of a job's id that a user may give


@dataclass(frozen=True)
class Record:
    """A job.

    Attributes:
        job: its id.
        command: program and arguments.
        hosts: their numbers of ranks, by name.
        cwd: directory in which it was started.
        launcher_host, machine: name and identity of the launcher's machine.
        pid, pid_start: of its launcher; the start time distinguishes it from a later process with that pid.
        began: seconds since the epoch.
        ended: the same, or None.
        code: its exit code, or None.
        grace: seconds that `ringdance stop` gives its ranks.
    """

    job: str
    command: list[str]
    hosts: dict[str, int]
    cwd: str
    launcher_host: str
    machine: str
    pid: int
    pid_start: str
    began: float
    ended: float | None = None
    code: int | None = None
    grace: float = 30.0

    @property
    def short(self) -> str:
        """The beginning of its id, for users."""
        return self.job[:8]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.hosts.values())

    @property
    def state(self) -> str:
        """Its current state: running, ended, lost (launcher killed), or elsewhere (on another machine)."""
        if self.ended is not None:
            return "ended"
        if self.machine == identity() and linux.start_of(self.pid) == self.pid_start:
            return "running"
        if self.reload().ended is not None:
            return "ended"
        # Machines may share the directory; one that was restarted has its name, but another identity.
        return "lost" if self.launcher_host == os.uname().nodename else "elsewhere"

    @property
    def about(self) -> str:
        """The job in a line: id, ranks, age, directory and command."""
        seconds = time.time() - self.began
        age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else ""
        age = age or f"{seconds / 3600:.0f} h"
        words = shlex.join([os.path.basename(self.command[0]), *self.command[1:]])
        return f"{self.short}: {self.ranks} ranks for {age}, in {self.cwd}: {words}"

    @property
    def over(self) -> bool:
        """Whether it has ended, or is so old that it has, as far as this machine can tell."""
        return self.state == "ended" or (self.state != "running" and time.time() - self.began > _OLD_S)

    @property
    def directory(self) -> Path:
        """Its directory."""
        return base() / self.job

    def reload(self) -> Record:
        """Read the record again."""
        return _load(self.directory) or self

    def write(self) -> None:
        """Write it, atomically; where the disk is full by now, over what is there."""
        path, text = self.directory / "job.json", json.dumps(asdict(self)).ljust(_SIZE)
        draft = path.with_name(f"job.json.{os.getpid()}")
        try:
            with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise
            with open(path, "r+") as file:
                file.write(text)


_KINDS = get_type_hints(Record)


def _load(directory: Path, tell: bool = False) -> Record | None:
    """Read a record; None if there is none, or it cannot be read, which `tell` says on stderr."""
    path = directory / "job.json"
    problem = f"{path} is damaged or of another version"
    try:
        check_regular(path)
        found = Record(**json.loads(path.read_text(encoding="utf-8")))
        for name, kind in _KINDS.items():
            typed(vars(found), name, kind)
        if found.job == directory.name and found.command and found.pid > 0 and found.pid_start:
            return found
    except (FileNotFoundError, NotADirectoryError):  # it is being made or removed; no record
        return None
    except (OSError, LaunchError) as error:
        problem = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
    except NO_FORMAT:
        pass
    if tell:
        print(f"ringdance: {problem}; it is left out", file=sys.stderr)
    return None


def base() -> Path:
    """Return the directory of all jobs' directories.

    Raises:
        LaunchError: no home directory is known.
    """
    try:
        state = os.environ.get("XDG_STATE_HOME") or in_home("~/.local/state")
    except FileNotFoundError as error:
        raise LaunchError(f"{error.filename}: {error.strerror} or XDG_STATE_HOME") from None
    return Path(state) / "ringdance" / "jobs"


def create(job: str, command: list[str], hosts: dict[str, int], grace: float = 30.0) -> Record:
    """Create the record of a job that this process runs, and redirect its stdout and stderr to the job's log.

    Raises:
        LaunchError: its directory cannot be made, or no home directory is known.
    """
    pid, machine = os.getpid(), (os.uname().nodename, identity())
    began = linux.start_of(pid), time.time()
    record = Record(job, command, hosts, os.getcwd(), *machine, pid, *began, grace=grace)
    try:
        base().mkdir(mode=0o700, parents=True, exist_ok=True)
        record.directory.mkdir(mode=0o700)
        record.write()
        _redirect(os.open(os.devnull, os.O_RDONLY), 0)
        _redirect(os.open(record.directory / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 1, 2)
    except OSError as error:
        raise LaunchError(f"cannot make {record.directory}: {error.strerror}") from None
    for old in [known for known in load_all() if known.over][:-_KEPT]:
        shutil.rmtree(old.directory, ignore_errors=True)
    return record


def load_all(tell: str | None = None) -> list[Record]:
    """Return all records, the oldest first; `tell`: say of which jobs that begin so it cannot be read."""
    paths = base().iterdir() if base().exists() else ()
    records = [_load(path, tell is not None and path.name.startswith(tell)) for path in paths]
    return sorted((record for record in records if record), key=lambda record: record.began)


def _environ_of(process: Any) -> dict[str, str]:
    """Return the environment of a process; none of one that has ended, or of another user's, as sshd."""
    with contextlib.suppress(Exception):
        return dict(process.environ())
    return {}


def rank_processes() -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the ``psutil.Process`` and the environment of each rank that runs here, of any job."""
    import psutil  # the launcher starts without it

    for process in psutil.process_iter():
        environ = _environ_of(process)
        if linux.MARKER in environ and "RINGDANCE_RANK" in environ:
            with contextlib.suppress(psutil.Error, OSError):
                if "RINGDANCE_RANK" not in _environ_of(process.parent()):  # else a rank's child
                    yield process, environ


def without_record() -> list[Record]:
    """Return the jobs of which ranks run here and there is no record: in the foreground, or of other hosts.

    Their `pid` is that of the process that started the job here, `command` and `cwd` are a rank's.
    """
    known, found = {record.job for record in load_all()}, dict[str, Record]()
    for process, environ in rank_processes():
        job = environ[linux.MARKER]
        if job in known:
            continue
        with contextlib.suppress(Exception):  # it may have ended meanwhile
            launcher = next(one for one in process.parents() if linux.MARKER not in _environ_of(one))
            host = os.uname().nodename
            ranks = found[job].ranks + 1 if job in found else 1
            start = linux.start_of(launcher.pid), launcher.create_time()
            found[job] = Record(
                job, process.cmdline(), {host: ranks}, process.cwd(), host, identity(), launcher.pid, *start
            )
    return sorted(found.values(), key=lambda record: record.began)


def find(name: str = "") -> Record:
    """Return the job whose id begins with `name`; by default the newest that runs, or else the newest.

    Raises:
        LaunchError: there is none, or more than one.
    """
    known = load_all(tell=name)
    if not name:
        if not known:
            raise LaunchError("no job has been started with `ringdance run --detach`")
        return ([record for record in known if record.state == "running"] or known)[-1]
    found = [record for record in known if record.job.startswith(name)] if len(name) >= _SHORTEST else []
    if len(found) > 1:
        raise LaunchError(f"{name} could be {' or '.join(r.short for r in found)}: give more digits")
    here = without_record() if len(name) >= _SHORTEST and not found else []
    for one in here:
        if one.job.startswith(name):
            raise LaunchError(
                f"job {one.short} runs in the foreground: end it with Ctrl-C where it was started (by "
                f"process {one.pid} on this host), and read its output there"
            )
    if not found:
        raise LaunchError(f"there is no job {name}; `ringdance status` shows all")
    return found[0]


def _redirect(opened: int, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)


def log_sink(stream: int) -> Sink:
    """Return a sink for stdout (1) or stderr (2) that writes to the log; after :func:`create`."""
    write = write_all(1)

    def log(data: bytes) -> None:
        text = json.dumps([stream, data.decode(errors="surrogateescape")], ensure_ascii=False)
        write(text.encode(errors="surrogateescape") + b"\n")

    return log


class LogReader:
    """Follow a job's log.

    Args:
        record: the job.
        start: whether to read from the beginning instead of from now.
    """

    def __init__(self, record: Record, start: bool = True) -> None:
        self._path = record.directory / "log"
        self._file = self._open()
        self._file.seek(0, os.SEEK_SET if start else os.SEEK_END)
        self._rest = b""

    def read(self, ended: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield streams and bytes written since the last call; `ended`: the job writes no more."""
        if ended:  # NFS shows all that another machine has written to those who open a file then
            at = self._file.tell()
            self._file.close()
            self._file = self._open()
            self._file.seek(at)
        for line in self._file:
            self._rest += line
            if line.endswith(b"\n"):
                yield self._parse()
        if ended and self._rest:
            yield self._parse()

    def _open(self) -> BinaryIO:
        check_regular(self._path)
        return open(self._path, "rb")

    def _parse(self) -> tuple[int, bytes]:
        line, self._rest = self._rest, b""
        with contextlib.suppress(*NO_FORMAT):
            stream, text = json.loads(line.decode(errors="surrogateescape"))
            if stream in (1, 2):
                return stream, text.encode(errors="surrogateescape")
        return 2, line  # the launcher's own words, as in a crash
