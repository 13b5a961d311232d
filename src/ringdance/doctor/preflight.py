"""The checks before a job starts: quick ones, on all its hosts; a result without errors holds for minutes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringdance import __version__
from ringdance.doctor.check import ERROR, WARNING, Result, Usage
from ringdance.doctor.examine import inspect
from ringdance.doctor.probe import QUICK
from ringdance.doctor.rows import several
from ringdance.errors import LaunchError
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.system.machine import in_home

if TYPE_CHECKING:
    from ringdance.launch.prepare import PreparedJob

MINUTES = 10.0
_PROBES_S = 30.0
# Left out: the launcher itself takes care of it.
_HANDLED = frozenset({"mpiexec-in-path", "proxies", "inside-a-job", "slurm-mpi", "ssh-permissions"})
# Warnings only: the launcher needs none of it (hosts may have names that only ssh resolves, output is written
# on the launcher's host, its directories have short paths), or it may be intended (a user's own module).
_WARNINGS = frozenset(
    {"own-name", "names-agree", "folder-writable", "temporary-path-length", "shadowed-modules"}
)


def check_hosts(
    ready: PreparedJob, report: Callable[[str], None], *, required: bool = True, minutes: float = MINUTES
) -> None:
    """Check the hosts of a job that is about to start; name warnings in one line.

    Args:
        ready: the job.
        report: called with each line for the user.
        required: whether errors are raised; else they are passed to `report`.
        minutes: for which a result without errors holds.

    Raises:
        LaunchError: the job would fail; nothing was started, and the agents were closed.
    """
    order = ready.spec
    slots = {host.name: len(host.ranks) for host in ready.plan.hosts}
    directories = [order.output_directory] if order.output_directory else []
    try:
        wrong = preflight(slots, shell=order.shell, directories=directories, minutes=minutes)
        lines = [
            f"host{'s' * (len(result.hosts) > 1)} {', '.join(result.hosts)}: {result.text}\n"
            f"    fix: {result.fix}"
            for result in wrong
            if result.severity == ERROR
        ]
        if lines and required:
            raise LaunchError("cannot start:\n  " + "\n  ".join(lines) + "\n(--no-check starts nevertheless)")
    except BaseException:
        ready.close()
        raise
    for line in lines:
        report(line)
    warnings = list(dict.fromkeys(result.check for result in wrong if result.severity == WARNING))
    if warnings:
        named = ",".join(f"{host}:{count}" for host, count in slots.items())
        report(
            f"may slow the job down or end it: {several(warnings, 6)}; "
            f"for the fixes: ringdance doctor --quick -H {named}"
        )


def preflight(
    slots: Mapping[str, int],
    *,
    shell: RemoteShell | None = None,
    directories: Iterable[str] = (),
    minutes: float = MINUTES,
) -> list[Result]:
    """Return what is wrong with the hosts of a job, errors first.

    Args:
        slots: ranks of each host, by its name.
        shell: how other hosts are reached (default: ssh).
        directories: for logs and checkpoints; each should be writable on all hosts.
        minutes: for which an earlier result without errors holds; 0 checks anew.
    """
    shell = shell or RemoteShell()
    usage = Usage(dict(slots), tuple(map(os.path.abspath, directories)), tuple(slots), os.getcwd())
    known = _read(usage, shell, minutes)
    if known is not None:
        return known
    _, results = inspect(tuple(slots), usage, QUICK, _PROBES_S, shell)
    wrong = [
        replace(result, severity=WARNING)
        if result.severity == ERROR and result.check in _WARNINGS
        else result
        for result in results
        if result.wrong and result.check not in _HANDLED
    ]
    wrong.sort(key=lambda result: result.severity != ERROR)
    if not any(result.severity == ERROR for result in wrong):
        _write(usage, shell, wrong)
    return wrong


def _cache(usage: Usage, shell: RemoteShell) -> Path:
    """Return the file for a result, by a digest of the request.

    Raises:
        FileNotFoundError: no home directory is known.
    """
    base = os.environ.get("XDG_CACHE_HOME") or in_home("~/.cache")
    request = [__version__, os.uname().nodename, vars(usage), vars(shell)]
    digest = hashlib.sha256(json.dumps(request, default=str, sort_keys=True).encode()).hexdigest()
    return Path(base) / "ringdance" / f"preflight-{digest[:24]}.json"


def _read(usage: Usage, shell: RemoteShell, minutes: float) -> list[Result] | None:
    try:
        cache = _cache(usage, shell)
        if time.time() - cache.stat().st_mtime > minutes * 60.0:
            return None
        entries = json.loads(cache.read_text(encoding="utf-8"))
        return [Result(**{**entry, "hosts": tuple(entry["hosts"])}) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(usage: Usage, shell: RemoteShell, results: Sequence[Result]) -> None:
    """Write the file, private and at once; a cache that cannot be written is no reason to stop."""
    with suppress(OSError):
        cache = _cache(usage, shell)
        draft = cache.with_suffix(f".{os.getpid()}")
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump([vars(result) for result in results], file)
        draft.replace(cache)
