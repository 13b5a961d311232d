"""Records of jobs that run in the background, each in a private directory.

``job.json`` contains the ``Record``, and ``log`` the job's output.
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
from ringdance.launch.hosts import counted

_KEPT = 50  # maximum number of ended jobs whose records are kept
_OLD_S = 90 * 86400.0
_SIZE = 4096  # size to which records are padded, so that recording a job's end needs no extra disk space
_SHORTEST = 4  # minimum length of a job ID prefix on the command line


@dataclass(frozen=True)
class Record:
    """The record of a background job.

    Attributes:
        job: Job ID.
        command: The program and its arguments.
        hosts: Number of ranks by host name.
        cwd: Directory in which the job was started.
        launcher_host, machine: Name and identity of the launcher's machine.
        pid, pid_start: Process ID and start time of the launcher. Together they identify the process even
            if the ID is reused.
        began: Start of the job in seconds since the epoch.
        ended: End of the job in seconds since the epoch, None until then.
        code: Exit code of the job, None until the job has ended.
        grace: Time in seconds for ranks to exit after ``ringdance stop``.
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
        """Short prefix of the job ID, for display."""
        return self.job[:8]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.hosts.values())

    @property
    def state(self) -> str:
        """State of the job: running, ended, lost (launcher killed), or elsewhere (on another machine)."""
        if self.ended is not None:
            return "ended"
        if self.machine == identity() and linux.start_of(self.pid) == self.pid_start:
            return "running"
        if self.reload().ended is not None:
            return "ended"
        # Machines may share the directory. After a reboot, a machine has the same name but a new identity.
        return "lost" if self.launcher_host == os.uname().nodename else "elsewhere"

    @property
    def about(self) -> str:
        """One-line description of the job: ID, ranks, age, directory and command."""
        seconds = time.time() - self.began
        age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else ""
        age = age or f"{seconds / 3600:.0f} h"
        words = shlex.join([os.path.basename(self.command[0]), *self.command[1:]])
        return f"{self.short}: {counted(self.ranks, 'rank')} for {age}, in {self.cwd}: {words}"

    @property
    def directory(self) -> Path:
        """Directory of the job's record and log."""
        return base() / self.job

    def reload(self) -> Record:
        """Return the record as it is on disk now."""
        return _load(self.directory) or self

    def write(self) -> None:
        """Write the record atomically. If that fails, as on a full disk, overwrite the existing record."""
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
    """Read a record. Returns None if it is missing, incomplete, damaged, or belongs to another directory."""
    with contextlib.suppress(OSError, LaunchError, *NO_FORMAT):
        record = Record(**json.loads((directory / "job.json").read_text(encoding="utf-8")))
        for name, kind in get_type_hints(Record).items():
            typed(vars(record), name, kind)
        if record.job == directory.name:
            return record
    return None


def base() -> Path:
    """Return the parent directory of all job directories."""
    return Path(os.environ.get("XDG_STATE_HOME") or in_home("~/.local/state"), "ringdance", "jobs")


def create(job: str, command: list[str], hosts: dict[str, int], grace: float = 30.0) -> Record:
    """Create a record for this process's job, and redirect this process's stdout and stderr to the job's log.

    Raises:
        LaunchError: The job's directory cannot be created.
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
        raise LaunchError(f"cannot create {record.directory}: {error.strerror}") from None
    # Keep recent records in state "lost": such a job may be running on another machine that has the same name
    # and shares the directory.
    gone = time.time() - _OLD_S
    done = [old for old in load_all() if old.ended or (old.began < gone and old.state != "running")]
    for old in done[:-_KEPT]:
        shutil.rmtree(old.directory, ignore_errors=True)
    return record


def load_all() -> list[Record]:
    """Return all records, the oldest first."""
    records = map(_load, base().iterdir() if base().exists() else ())
    return sorted((record for record in records if record), key=lambda record: record.began)


def _environ_of(process: Any) -> dict[str, str]:
    """Return a process's environment, or {} if the process has exited or belongs to another user."""
    with contextlib.suppress(Exception):
        return dict(process.environ())
    return {}


def rank_processes() -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the ``psutil.Process`` and the environment of every rank on this host, for all jobs."""
    import psutil  # imported late, because the launcher does not need it to start

    for process in psutil.process_iter():
        environ = _environ_of(process)
        if linux.MARKER in environ and "RINGDANCE_RANK" in environ:
            with contextlib.suppress(psutil.Error, OSError):
                if "RINGDANCE_RANK" not in _environ_of(process.parent()):  # skip a rank's children
                    yield process, environ


def without_record() -> list[Record]:
    """Return jobs with ranks on this host but no record: foreground jobs, and jobs started on other hosts.

    In the results, ``pid`` is the process that started the ranks, and ``command`` and ``cwd`` are a rank's.
    """
    known, unrecorded = {record.job for record in load_all()}, dict[str, Record]()
    for process, environ in rank_processes():
        job = environ[linux.MARKER]
        if job in known:
            continue
        with contextlib.suppress(Exception):  # ignore processes that have exited
            launcher = next(parent for parent in process.parents() if linux.MARKER not in _environ_of(parent))
            host = os.uname().nodename
            ranks = unrecorded[job].ranks + 1 if job in unrecorded else 1
            start = linux.start_of(launcher.pid), launcher.create_time()
            unrecorded[job] = Record(
                job, process.cmdline(), {host: ranks}, process.cwd(), host, identity(), launcher.pid, *start
            )
    return sorted(unrecorded.values(), key=lambda record: record.began)


def find(name: str = "") -> Record:
    """Return the job whose ID starts with ``name``. Default: the newest running job, or else the newest job.

    Raises:
        LaunchError: No job matches, or more than one does.
    """
    known = load_all()
    if not name:
        if not known:
            raise LaunchError("no job has been started with `ringdance run --detach`")
        return ([record for record in known if record.state == "running"] or known)[-1]
    matching = [record for record in known if record.job.startswith(name)] if len(name) >= _SHORTEST else []
    if len(matching) > 1:
        raise LaunchError(
            f"{name} matches jobs {' and '.join(r.short for r in matching)}. Specify more digits of the ID."
        )
    if not matching:
        raise LaunchError(f"no background job matches {name}. `ringdance status` lists the IDs of all jobs.")
    return matching[0]


def _redirect(opened: int, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    os.close(opened)
