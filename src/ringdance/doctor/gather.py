"""Facts of several hosts: one probe process on each host, over ssh."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from ringdance.doctor.check import Usage
from ringdance.doctor.probe import MARK
from ringdance.doctor.rows import several
from ringdance.errors import LaunchError
from ringdance.launch.remote.connect import PIPES, allow_open_files
from ringdance.launch.remote.shell import SSH_ADVICE, RemoteShell

_SPARE_S = 30.0  # for ssh and for starting Python, beyond the limit of the probes
_NAMES = 16  # of other hosts, that a host resolves
# Where libraries are: a job's ranks get these of the launcher's, whatever a host's own login sets.
_LIBRARIES = (
    "LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "I_MPI_ROOT", "MPI4PY_LIBMPI", "MPI4PY_MPIABI",
)  # fmt: skip
_ADVICE = (
    *SSH_ADVICE,
    (
        "No module named '?ringdance", f"{sys.executable} has no ringdance there",
        "install it there as it is installed here, or give an interpreter that has it: --python PATH",
    ),
    (
        "No such file or directory|not found", f"there is no {sys.executable}",
        "install the same environment under the same path there, or give its interpreter: --python PATH",
    ),
    ("", "not reached", "see what ssh reports: ssh -v -o BatchMode=yes HOST true"),
)  # fmt: skip
"""For messages of ssh or of the shell there: a pattern, the problem, its fix. The first that fits counts."""


class Remote:
    """A probe process on a host.

    Attributes:
        host: its name.
        local: whether that is this machine.
        problem: why it does not answer, and the fix; empty if it does.
    """

    def __init__(self, host: str, shell: RemoteShell, local: bool) -> None:
        self.host, self.local = host, local
        self.problem: tuple[str, str] | tuple[()] = ()
        self._noise = ""  # of its login
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[str] | None = None
        # -P: a random.py in the working directory must not be imported.
        line = [sys.executable, "-P", "-m", "ringdance.doctor.probe"]
        try:
            line = line if local else shell.command(host, line)
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                errors="replace", start_new_session=True, env=shell.environ,
            )  # fmt: skip
        except LaunchError as error:
            self.problem = str(error), "correct the name"
        except OSError as error:
            self.problem = self._advice(f"{line[0]}: {error.strerror}")

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer; ``{"error": WHY}`` if none comes within `seconds`."""
        if self.problem:
            return {"error": self.problem[0]}
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        late = threading.Timer(seconds, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; its output says why
            pass
        for line in self._process.stdout:
            if line.startswith(MARK):
                late.cancel()
                return json.loads(line.removeprefix(MARK))
            self._noise += line
        expired = not late.is_alive()
        late.cancel()
        code = self._process.wait()
        self._errors.seek(0)
        output = f"{self._noise}\n{self._errors.read().decode(errors='replace')}"
        self.problem = self._advice(f"no answer within {seconds:g} s" if expired else output, code)
        return {"error": self.problem[0]}

    def _advice(self, output: str, code: int = 0) -> tuple[str, str]:
        lines = [line.strip()[:300] for line in output.splitlines() if line.strip()] or [f"exit code {code}"]
        return next(
            (f"{problem}: {line}", fix.replace("HOST", self.host))
            for pattern, problem, fix in _ADVICE
            for line in reversed(lines)
            if re.search(pattern, line)
        )

    def close(self) -> None:
        """End the process; one that waits for a dead network disk is left."""
        if self._process:
            for end in (self._process.terminate, self._process.kill):
                end()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(2.0)
                    break
        self._errors.close()


T = TypeVar("T")


def _in_threads(function: Callable[[T], None], items: Iterable[T]) -> None:
    """Call `function` for all items at once; Ctrl-C does not wait for the calls."""
    threads = [threading.Thread(target=function, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def started(hosts: Sequence[str], shell: RemoteShell, local: Collection[str]) -> Iterator[dict[str, Remote]]:
    """Start a probe process on each host, and end them afterwards.

    Args:
        hosts: their names.
        shell: how other hosts are reached.
        local: those of `hosts` that are this machine.

    Raises:
        LaunchError: this process may not open as many files.
    """
    allow_open_files(PIPES * len(hosts), f"{len(hosts)} hosts")
    with ExitStack() as stack:
        yield {host: stack.enter_context(closing(Remote(host, shell, host in local))) for host in hosts}


def collect(
    remotes: Mapping[str, Remote],
    probes: Collection[str],
    usage: Usage,
    seconds: float,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Return the facts of each host, of all at once; only "reach" of one that does not answer.

    Args:
        remotes: by host.
        probes: names of the probes.
        usage: what the hosts are to be used for.
        seconds: limit for the probes.
        report: called with a text that names what is being waited for.
    """
    found: dict[str, dict[str, Any]] = {}
    waiting = list(remotes)
    slow = ", importing frameworks" if "frameworks" in probes else ""

    def show() -> None:
        if waiting:
            report(f"checking {several(waiting, 4)}{slow}")

    def one(host: str) -> None:
        names = {**request["usage"], "hosts": _sample(usage.hosts, host)}
        found[host] = _facts(remotes[host], {**request, "usage": names}, seconds)
        waiting.remove(host)
        show()

    show()
    with ExitStack() as stack:
        made = []
        for directory in usage.directories:
            with suppress(OSError):  # of one that cannot be written
                mark = tempfile.TemporaryDirectory(
                    prefix=".ringdance-doctor-", dir=directory, ignore_cleanup_errors=True
                )
                made.append(stack.enter_context(mark))
        request: dict[str, Any] = {
            "probes": list(probes),
            "usage": asdict(replace(usage, probe_files=tuple(made))),
            "seconds": seconds,
            "environ": {name: os.environ[name] for name in _LIBRARIES if name in os.environ},
        }
        _in_threads(one, remotes)
    return {host: found[host] for host in remotes}


def _sample(hosts: Sequence[str], host: str) -> list[str]:
    """Return the names that a host resolves: those after its own, so that several hosts resolve each."""
    at = hosts.index(host) if host in hosts else 0
    return [*hosts, *hosts][at : at + min(len(hosts), _NAMES + 1)]


def _facts(remote: Remote, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    sent = time.time()
    found = remote.ask(request, seconds + _SPARE_S)
    received = time.time()
    if remote.problem:
        return {"reach": {"error": remote.problem[0], "fix": remote.problem[1]}}
    # Its clock is ahead by some number between these two.
    ahead = [found["times"]["ended"] - received, found["times"]["began"] - sent]
    return found | {"reach": {"error": "", "local": remote.local, "ahead": ahead}}
