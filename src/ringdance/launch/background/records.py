"""What is known of jobs that run in the background: a private folder for each, with its output.

``job.json`` says what it is and how it ended; ``output`` holds what it wrote, as a terminal would have shown
it; ``streams`` tells which parts of that were stdout (1) and which stderr (2), as lines ``STREAM BYTES``.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.launch.system import linux
from ringdance.launch.system.machine import identity, in_home

_KEPT = 50  # records of jobs that are over
_LEAST = 4  # digits by which a job may be called


@dataclass(frozen=True)
class Record:
    """A job.

    Attributes:
        job: its id.
        command: program and arguments.
        hosts: names, with their numbers of ranks.
        folder: in which it was started.
        machine: of its launcher: name and identity.
        pid, mark: of its launcher; the mark tells it from a later process with that pid.
        began: seconds since the epoch.
        ended: the same, or None.
        code: its exit code, or None.
    """

    job: str
    command: tuple[str, ...]
    hosts: tuple[tuple[str, int], ...]
    folder: str
    machine: tuple[str, str]
    pid: int
    mark: str
    began: float
    ended: float | None = None
    code: int | None = None

    @property
    def short(self) -> str:
        """What a person calls it."""
        return self.job[:8]

    @property
    def ranks(self) -> int:
        """How many it has."""
        return sum(count for _, count in self.hosts)

    @property
    def here(self) -> bool:
        """Whether its launcher is, or was, on this machine: others may share the folder."""
        return self.machine[1] == identity()

    @property
    def state(self) -> str:
        """As it is now: running, ended, lost (its launcher was killed), or elsewhere (on another machine)."""
        if self.ended is not None:
            return "ended"
        if not self.here:
            return "elsewhere"
        if linux.start_of(self.pid) == self.mark:
            return "running"
        return "ended" if self.fresh().ended is not None else "lost"

    def fresh(self) -> Record:
        """The same as it is kept now."""
        try:
            return _parse((self.place / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError):
            return self

    @property
    def place(self) -> Path:
        """Its folder."""
        return base() / self.job

    def write(self) -> None:
        """Keep it: whole, or as it was."""
        draft = self.place / f"job.json.{os.getpid()}"
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        draft.replace(self.place / "job.json")


def base() -> Path:
    """Where the jobs' folders are.

    Raises:
        LaunchError: no home directory is known.
    """
    try:
        given = os.environ.get("XDG_STATE_HOME") or in_home("~/.local/state")
    except FileNotFoundError as error:
        raise LaunchError(f"{error.filename}: {error.strerror} or XDG_STATE_HOME") from None
    return Path(given) / "ringdance" / "jobs"


def own(job: str, command: list[str], hosts: list[tuple[str, int]]) -> Record:
    """The record of a job that this process runs, kept from now on.

    Raises:
        LaunchError: its folder cannot be made, or no home directory is known.
    """
    record = Record(
        job, tuple(command), tuple(hosts), os.getcwd(), (os.uname().nodename, identity()), os.getpid(),
        linux.start_of(os.getpid()), time.time(),
    )  # fmt: skip
    try:
        base().mkdir(mode=0o700, parents=True, exist_ok=True)
        record.place.mkdir(mode=0o700)
        record.write()
    except OSError as error:
        raise LaunchError(f"{record.place} cannot be made: {error.strerror}") from None
    for old in [known for known in every() if known.state == "ended"][:-_KEPT]:
        shutil.rmtree(old.place, ignore_errors=True)
    return record


def every() -> list[Record]:
    """All that are known, the oldest first."""
    found = []
    for path in base().glob("*/job.json"):
        try:
            found.append(_parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # being removed just now, or of another version
    return sorted(found, key=lambda record: record.began)


def _parse(text: str) -> Record:
    values = json.loads(text)
    record = Record(**{field.name: values[field.name] for field in fields(Record)})
    return replace(
        record,
        command=tuple(record.command),
        hosts=tuple((name, count) for name, count in record.hosts),
        machine=(record.machine[0], record.machine[1]),
    )


def find(name: str = "") -> Record:
    """The job whose id begins so; without a name the newest that runs, else the newest.

    Raises:
        LaunchError: there is none, or more than one.
    """
    known = every()
    if not name:
        running = [record for record in known if record.state == "running"]
        if not known:
            raise LaunchError("no job has been started with `ringdance run --detach`")
        return (running or known)[-1]
    meant = [record for record in known if record.job.startswith(name)] if len(name) >= _LEAST else []
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise LaunchError(f"{name} could be {' or '.join(r.short for r in meant)}: give more digits")
    raise LaunchError(f"there is no job {name}; `ringdance status` shows all")


class Output:
    """What a job writes, kept in its folder; nothing before :meth:`open`."""

    def __init__(self) -> None:
        self._files: tuple[int, int] | None = None

    def open(self, place: Path) -> int:
        """Make the files; the descriptor of the output itself.

        Raises:
            LaunchError: they cannot be made.
        """
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        try:
            output, streams = (os.open(place / name, flags, 0o600) for name in ("output", "streams"))
        except OSError as error:
            raise LaunchError(f"{place}: {error.strerror}") from None
        self._files = output, streams
        return output

    def sink(self, stream: int) -> Callable[[bytes], None]:
        """Takes what goes to stdout (1) or stderr (2)."""

        def write(data: bytes) -> None:
            assert self._files
            view = memoryview(data)
            while view:  # what is in the output but in no line of streams counts as stderr
                count = os.write(self._files[0], view)
                os.write(self._files[1], b"%d %d\n" % (stream, count))
                view = view[count:]

        return write


class Reader:
    """Follows a job's output.

    Args:
        record: the job.
        start: whether from the beginning, else from now.
    """

    def __init__(self, record: Record, start: bool = True) -> None:
        self._output = open(record.place / "output", "rb", buffering=0)  # noqa: SIM115
        self._streams = open(record.place / "streams", "rb", buffering=0)  # noqa: SIM115
        self._held = b""
        self._skip = 0 if start else os.fstat(self._output.fileno()).st_size

    def read(self, all_: bool = False) -> list[tuple[int, bytes]]:
        """What has come since the last call, as streams and their bytes; `all_`: the job is over."""
        found: list[tuple[int, bytes]] = []
        *lines, self._held = (self._held + self._streams.read()).split(b"\n")
        for line in lines:
            stream, count = line.split()
            self._take(found, int(stream), int(count))
        if all_:
            self._take(found, 2, os.fstat(self._output.fileno()).st_size - self._output.tell())
        return found

    def _take(self, found: list[tuple[int, bytes]], stream: int, count: int) -> None:
        skipped = min(self._skip, count)
        self._skip -= skipped
        self._output.seek(skipped, os.SEEK_CUR)
        data = self._output.read(count - skipped)
        if data and found and found[-1][0] == stream and len(found[-1][1]) < 1 << 20:
            found[-1] = stream, found[-1][1] + data
        elif data:
            found.append((stream, data))

    def close(self) -> None:
        """Close the files."""
        self._output.close()
        self._streams.close()
