"""Keep records of jobs that run in the background: a private directory for each.

``job.json`` holds the :class:`Record`, ``log`` the job's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ringdance.errors import LaunchError
from ringdance.host.files import NO_FORMAT, typed, whole_text
from ringdance.host.system import linux
from ringdance.host.system.machine import identity, in_home

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
        """Whether it runs no more, as far as this machine can tell."""
        return self.state in ("ended", "lost")

    @property
    def directory(self) -> Path:
        """Its directory."""
        return base() / self.job

    def reload(self) -> Record:
        """Read the record again."""
        return _load(self.directory) or self

    def write(self) -> None:
        """Write it, atomically. If the disk is full by now, overwrite the record that is there."""
        path, text = self.directory / "job.json", json.dumps(asdict(self)).ljust(_SIZE)
        try:
            with whole_text(path) as file:
                file.write(text)
        except OSError:
            if not path.exists():
                raise
            with open(path, "r+") as file:
                file.write(text)


def _load(directory: Path) -> Record | None:
    """Read a record; None if there is none, it is being made or removed, damaged, or another directory's."""
    with contextlib.suppress(OSError, LaunchError, *NO_FORMAT):
        found = Record(**json.loads((directory / "job.json").read_text(encoding="utf-8")))
        for name, kind in get_type_hints(Record).items():
            typed(vars(found), name, kind)
        if found.job == directory.name:
            return found
    return None


def base() -> Path:
    """Return the directory of all jobs' directories."""
    return Path(os.environ.get("XDG_STATE_HOME") or in_home("~/.local/state"), "ringdance", "jobs")


def create(job: str, command: list[str], hosts: dict[str, int], grace: float = 30.0) -> Record:
    """Create the record of a job that this process runs, and redirect its stdout and stderr to the job's log.

    Raises:
        LaunchError: its directory cannot be made.
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
    # A lost one may run on another machine of this name that shares the directory.
    gone = time.time() - _OLD_S
    done = [one for one in load_all() if one.ended or (one.began < gone and one.state != "running")]
    for old in done[:-_KEPT]:
        shutil.rmtree(old.directory, ignore_errors=True)
    return record


def load_all() -> list[Record]:
    """Return all records, the oldest first."""
    records = map(_load, base().iterdir() if base().exists() else ())
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
    known = load_all()
    if not name:
        if not known:
            raise LaunchError("no job has been started with `ringdance run --detach`")
        return ([record for record in known if record.state == "running"] or known)[-1]
    found = [record for record in known if record.job.startswith(name)] if len(name) >= _SHORTEST else []
    if len(found) > 1:
        raise LaunchError(f"{name} could be {' or '.join(r.short for r in found)}: give more digits")
    if not found:
        raise LaunchError(f"there is no job {name} in the background; `ringdance status` shows all jobs")
    return found[0]


def _redirect(opened: int, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)
