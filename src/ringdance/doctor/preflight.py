"""The checks before a job starts: quick ones, on all its hosts, remembered for minutes if all is well."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringdance import __version__
from ringdance.doctor import links
from ringdance.doctor.gather import gather
from ringdance.doctor.probe import QUICK
from ringdance.doctor.registry import ERROR, WARNING, Facts, Result, Wanted, examine
from ringdance.errors import LaunchError
from ringdance.launch.hosts import local_names
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.system.machine import in_home

if TYPE_CHECKING:
    from ringdance.launch.spec import PreparedJob

MINUTES = 10.0
_LINKS_S = 5.0
# What a person may want to know of, but not at each start; or what the launcher itself takes care of.
_UNASKED = frozenset(
    {
        "mpiexec-as-root", "ucx-windows", "mpiexec-in-path", "zombies", "session-folders", "proxies",
        "inside-a-job", "slurm-mpi", "slurm-worlds", "virtual-interfaces", "framework-installed",
        "ssh-client", "ssh-key-permissions", "ssh-folder-permissions", "ssh-agent",
    }
)  # fmt: skip
# Errors in general, but no reason not to start: the launcher itself needs none of it (hosts may have names
# that only ssh knows, output is written where the launcher is, its folders have short paths), or it may be
# meant (a module of the user's with such a name).
_NO_HINDRANCE = frozenset(
    {
        "own-name", "names-agree", "folder-writable", "port-taken", "temporary-path-length",
        "shadowed-modules",
    }
)  # fmt: skip
_MOST_NAMED = 6


def look(
    ready: PreparedJob, say: Callable[[str], None], *, hinders: bool = True, minutes: float = MINUTES
) -> None:
    """Look at the hosts of a job that is about to start; warnings are said in one line.

    Args:
        ready: the job.
        say: told what is for the user, line by line.
        hinders: whether errors are raised; else they are only said.
        minutes: for which an outcome without errors holds.

    Raises:
        LaunchError: it would fail; nothing has been started, and the agents have been sent home.
    """
    order = ready.order
    slots = {host.name: len(host.ranks) for host in ready.plan.hosts}
    try:
        wrong = preflight(
            slots, reach=order.shell, folders=[order.folder] if order.folder else (), minutes=minutes
        )
        lines = [
            f"{_where(result)}{result.text}\n    mend: {result.mend}"
            for result in wrong
            if result.severity == ERROR
        ]
        if lines and hinders:
            raise LaunchError(
                "nothing was started, for:\n  " + "\n  ".join(lines) + "\n(--no-check starts all the same)"
            )
    except BaseException:
        ready.close()
        raise
    for line in lines:
        say(line)
    warnings = list(dict.fromkeys(result.check for result in wrong if result.severity == WARNING))
    if warnings:
        more = f" and {len(warnings) - _MOST_NAMED} more" if len(warnings) > _MOST_NAMED else ""
        named = ",".join(f"{host}:{count}" for host, count in slots.items())
        say(
            f"may slow the job down or end it: {', '.join(warnings[:_MOST_NAMED])}{more}; "
            f"for what to do: ringdance doctor --quick -H {named}"
        )


def _where(result: Result) -> str:
    return f"host{'s' if len(result.hosts) > 1 else ''} {', '.join(result.hosts)}: "


def _weighed(result: Result) -> Result:
    """As it counts before a job."""
    mild = result.severity == ERROR and result.check in _NO_HINDRANCE
    return replace(result, severity=WARNING) if mild else result


def preflight(
    slots: Mapping[str, int],
    *,
    reach: RemoteShell | None = None,
    folders: Iterable[str] = (),
    minutes: float = MINUTES,
    seconds: float = 30.0,
) -> list[Result]:
    """What is wrong with the hosts of a job, errors first; empty if nothing is.

    An outcome without errors holds for some minutes, so that the next start asks nobody.

    Args:
        slots: ranks of each host, by its name.
        reach: how other hosts are reached (default: ssh).
        folders: for logs and checkpoints; each should be writable on all hosts.
        minutes: for which an outcome holds; 0 asks anew.
        seconds: time for looking.
    """
    reach = reach or RemoteShell()
    wanted = Wanted(
        dict(slots), tuple(os.path.abspath(folder) for folder in folders), tuple(slots), os.getcwd()
    )
    place = _place(wanted, reach)
    known = _remembered(place, minutes) if place else None
    if known is not None:
        return known
    _, results = examined(tuple(slots), wanted, QUICK, seconds, reach)
    wrong = [_weighed(result) for result in results if result.wrong and result.check not in _UNASKED]
    wrong.sort(key=lambda result: result.severity != ERROR)
    if place and not any(result.severity == ERROR for result in wrong):
        _remember(place, wrong)
    return wrong


def examined(
    hosts: Sequence[str],
    wanted: Wanted,
    probes: Collection[str],
    seconds: float,
    reach: RemoteShell,
    names: Iterable[str] | None = None,
    links_seconds: float = _LINKS_S,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Facts], list[Result]]:
    """Facts of the hosts, measured links included, and what the checks say of them.

    Args:
        hosts: their names; links are measured if two or more answer.
        wanted: what they are to be used for.
        probes: what to look at; "links" among the `names`' needs is always measured.
        seconds: time for the probes.
        reach: how other hosts are reached.
        names: of the checks, None for all.
        links_seconds: time for measuring links; 0 measures none.
        report: called with a text that names what is being waited for.
    """
    local = local_names(hosts)
    facts = gather(hosts, probes, wanted, seconds, reach, local, report)
    answering = {host: found for host, found in facts.items() if not found["reach"]["error"]}
    if len(answering) > 1 and links_seconds:
        report(f"measuring the links between {len(answering)} hosts")
        for host, found in links.measure(answering, reach, local, links_seconds).items():
            facts[host] = {**facts[host], "links": found}
    return facts, examine(facts, wanted, names)


def _place(wanted: Wanted, reach: RemoteShell) -> Path | None:
    """The file for an outcome: its name says for what; None if no home directory is known."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or in_home("~/.cache")
    except FileNotFoundError:
        return None
    key = json.dumps(
        [__version__, os.uname().nodename, vars(wanted), vars(reach)], default=str, sort_keys=True
    )
    return Path(base) / "ringdance" / f"preflight-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _remembered(place: Path, minutes: float) -> list[Result] | None:
    try:
        if time.time() - place.stat().st_mtime > minutes * 60.0:
            return None
        entries = json.loads(place.read_text(encoding="utf-8"))
        return [Result(**{**entry, "hosts": tuple(entry["hosts"])}) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(place: Path, results: Sequence[Result]) -> None:
    """Private, and whole or not there at all; a cache that cannot be written is no reason to stop."""
    draft = place.with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump([vars(result) for result in results], file)
        draft.replace(place)
    except OSError:
        pass
