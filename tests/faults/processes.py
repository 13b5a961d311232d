"""Helpers for the fault tests: start a job, and find its processes by the test's own marker."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import psutil
import pytest

from ringdance.host.directories import host_name
from ringdance.tools.cli import main

MARKER = "FAULT_TEST"
SHARED = Path("/dev/shm")
THESIS = "my-thesis"
INTEL = any(distribution.metadata["Name"] == "impi-rt" for distribution in importlib.metadata.distributions())
"""True if the tests run with Intel MPI."""


@dataclass
class Job:
    """A `ringdance run` with its own TMPDIR. All its processes carry the same marker."""

    process: subprocess.Popen[bytes]
    marker: str
    temporary: Path
    started: float = field(default_factory=time.monotonic)
    ids: set[str] = field(default_factory=set)

    def processes(self) -> list[psutil.Process]:
        """Return all living processes, including the launcher. Records the job's id as a side effect."""
        processes = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                if environ.get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
                    if "RINGDANCE_JOB" in environ:
                        self.ids.add(environ["RINGDANCE_JOB"])
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return processes

    def leftovers(self) -> list[str]:
        """Describe everything that is left of the job."""
        left = [f"process {process.pid}: {describe(process)}" for process in self.processes()]
        places = [place for place, _, _ in os.walk(self.temporary) if place != str(self.temporary)]
        # PyTorch's shared memory managers leave an empty socket when they are killed.
        places = [place for place in places if not os.path.basename(place).startswith("torch-shm-dir-")]
        # The job's directory is in /tmp if TMPDIR's path is too long for a socket's address.
        places += [str(path) for path in Path("/tmp").glob("ringdance-*") if self.owns(path.name)]
        left += [f"file {place}" for place in places if not os.path.exists(f"{place}/{THESIS}")]
        names = [line for line in segments(self.temporary) if (SHARED / line).exists()]
        names += [path.name for path in SHARED.glob("ringdance-*") if self.owns(path.name)]
        return left + [f"shared memory {name}" for name in names]

    def end(self) -> None:
        """Kill whatever a failed test has left of the job."""
        self.process.kill()
        self.process.wait()
        if wait_until(lambda: not self.processes(), 5.0) is None:
            for process in self.processes():
                process.kill()

    def owns(self, name: str) -> bool:
        """Return True if a directory with this name belongs to the job."""
        return any(name.startswith(f"ringdance-{id_[:12]}") for id_ in self.ids)


class Others:
    """Files and directories of another program of the same user, which no job may touch.

    Those in shared memory are closed but not unlinked, and have names like those that libraries use. The
    directories are in `temporary`.
    """

    def __init__(self, temporary: Path) -> None:
        mark = uuid.uuid4().hex[:8]
        names = (f"psm_{mark}", f"sem.mp-{mark}", f"mpich_shar_tmp{mark}", f"torch_4194999_{mark}_0")
        like_a_job = f"ringdance-{mark}0000-{host_name()}"
        places = [temporary / name for name in ("ringdance-of-mine", like_a_job)]
        self._files = [SHARED / name for name in names] + [place / THESIS for place in places]
        for place in places:
            place.mkdir(parents=True)
        self.change()
        for place in places:
            os.utime(place, (time.time() - 300,) * 2)

    def change(self) -> None:
        """Write to each file, as its own program does while the job runs."""
        for file in self._files:
            file.write_text("important")

    def missing(self) -> list[str]:
        """Return the files that no longer exist, and remove the others."""
        missing = [str(file) for file in self._files if not file.exists()]
        for file in self._files:
            file.unlink(missing_ok=True)
        return missing


def segments(temporary: Path) -> list[str]:
    """Return the names of shared memory segments recorded by the job's ranks and workers."""
    path = temporary.parent / "segments"
    return path.read_text().split() if path.exists() else []


def describe(process: psutil.Process) -> str:
    """Return the process's command line, or "(gone)" if it has exited."""
    try:
        return " ".join(process.cmdline())[-200:]
    except psutil.Error:
        return "(gone)"


def start(directory: Path, *command: str, **options: object) -> Job:
    """Start ``ringdance run`` with `command`. Its TMPDIR is ``directory/tmp``."""
    marker = uuid.uuid4().hex
    temporary = directory / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, MARKER: marker, "TMPDIR": str(temporary)}
    environ["SEGMENTS"] = str(directory / "segments")
    line = [sys.executable, "-m", "ringdance", "run", *command]
    return Job(subprocess.Popen(line, env=environ, **options), marker, temporary)  # type: ignore[call-overload]


def by_main(
    *words: str, env: dict[str, str] | None = None, cwd: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``ringdance`` with `words` within this process, which has imported it already.

    Args:
        words: Words of the command line.
        env: Complete environment. Default: this process's environment.
        cwd: Working directory.
        given: Text for stdin.

    Returns:
        The exit code and the output, including output of processes that the command has started.
    """
    with contextlib.ExitStack() as stack:
        out, err, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(given.encode())
        stdin.seek(0)
        with streams(stdin, out, err), mock.patch.dict(os.environ, env or {}, clear=env is not None):
            stack.enter_context(contextlib.chdir(cwd or os.getcwd()))
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["ringdance", *words], code, *texts)


@contextlib.contextmanager
def streams(*files: BinaryIO) -> Iterator[None]:
    """Redirect descriptors 0, 1 and 2 to these files, and sys.stdout and sys.stderr too."""
    former = [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    try:
        with (
            open(1, "w", encoding="utf-8", closefd=False) as out,
            open(2, "w", encoding="utf-8", closefd=False, buffering=1) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield
    finally:
        for number, descriptor in enumerate(former):
            os.dup2(descriptor, number)
            os.close(descriptor)


def needed(*packages: str) -> None:
    """Skip a test or module without these packages, which jobs import but this process does not need."""
    if missing := [name for name in packages if not find_spec(name)]:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)


def script(directory: Path, text: str) -> str:
    """Write a program for the ranks and return its path."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Return the seconds until the condition holds, or None if it does not hold within `seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def monitors_have_ended(seconds: float = 20.0) -> bool:
    """Wait until no monitor runs on this host. On a busy host, one may outlive its job and still write."""

    def none() -> bool:
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return "ringdance.core.monitor.main" not in listing

    return wait_until(none, seconds) is not None
