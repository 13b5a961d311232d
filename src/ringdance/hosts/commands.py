"""The subcommands of ``ringdance hosts``: each prints what it finds and returns the exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from ringdance.hosts import files
from ringdance.hosts.copy import Copy, Outcome
from ringdance.hosts.host_set import HostSet
from ringdance.hosts.progress import CopyProgress
from ringdance.launch.hosts import spans
from ringdance.launch.plan import devices_text, table


def _print_problems(problems: Mapping[str, str]) -> int:
    """Print what is wrong with each host; return the exit code."""
    sys.stdout.flush()
    for host, problem in problems.items():
        print(f"ringdance hosts: host {host}: {problem}", file=sys.stderr)
    return int(bool(problems))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def list_hosts(arguments: argparse.Namespace, hosts: HostSet) -> int:
    """Show hosts, whether they answer, and the user's ranks there."""
    hosts.connect(arguments.connect_timeout)
    answers = hosts.ask({host: {"task": "jobs"} for host in hosts.connected})
    hosts.problems |= {host: answer["problem"] for host, answer in answers.items() if answer["problem"]}
    jobs = {host: answer["jobs"] for host, answer in answers.items() if not answer["problem"]}
    rows = []
    for host, slots in hosts.slots.items():
        facts = hosts.agents[host].facts if host in hosts.agents else None
        rows.append({
            "host": host, "slots": slots or None, "reachable": host in jobs,
            "problem": hosts.problems.get(host, ""),
            "name": facts.name if facts else None,
            "cores": facts.cores if facts else None,
            "devices": list(facts.devices) if facts else [],
            "jobs": jobs.get(host, {}),
        })  # fmt: skip
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return int(bool(hosts.problems))
    head = ("host", "slots", "answers", "cores", "devices", "ranks of ours")
    print("\n".join(table([head, *map(_row, rows)])))
    return _print_problems(hosts.problems)


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    jobs = [
        f"job {job[:8]}: " + (spans(found["ranks"]) if found["ranks"] else f"{found['processes']} processes")
        for job, found in row["jobs"].items()
    ]
    known = (row["slots"], "yes" if row["reachable"] else "no", row["cores"])
    cells = (*known, devices_text(row["devices"]), "; ".join(jobs))
    return (row["host"], *(str(cell) if cell else "-" for cell in cells))


def copy(arguments: argparse.Namespace, hosts: HostSet) -> int:
    """Copy a file or a directory to all hosts."""
    destination = arguments.destination or os.path.abspath(arguments.source)
    source = files.collect(arguments.source, destination, arguments.checksum)
    for path in source.skipped:
        print(f"ringdance hosts: {path} is neither file, directory nor link: left out", file=sys.stderr)
    hosts.connect(arguments.connect_timeout)
    progress = CopyProgress(source.size)
    start = time.monotonic()
    copying = Copy(hosts, source, progress, direct=arguments.direct, checksum=arguments.checksum)
    try:
        outcomes = copying.run()
    except KeyboardInterrupt:
        progress.print("interrupted; the same command resumes the copy")
        raise
    finally:
        progress.stop()
    if arguments.json:
        print(json.dumps([{"host": host, **vars(one)} for host, one in outcomes.items()], indent=2))
    else:
        print(_summary(outcomes, time.monotonic() - start))
        _print_problems({host: one.problem or one.bad[0] for host, one in outcomes.items() if one.failed})
    return int(any(one.failed for one in outcomes.values()))


def _summary(outcomes: Mapping[str, Outcome], seconds: float) -> str:
    good = sum(not one.failed for one in outcomes.values())
    there = min(one.there for one in outcomes.values())
    size = max(one.bytes for one in outcomes.values())
    kept = max(one.kept for one in outcomes.values())
    hosts = _count(len(outcomes), "host")
    written = _count(max(one.files for one in outcomes.values()), "file")
    where = hosts if good == len(outcomes) else f"{good} of {hosts}"
    parts = [f"{written}, {decimal(size)}, to {where} in {seconds:.1f} s"]
    parts += [f"{decimal(int(size / seconds))}/s to each"] if size > 10e6 else []
    parts += [f"resumed after {decimal(kept)} of an earlier copy"] if kept else []
    parts += [f"{there} {'was' if there == 1 else 'were'} there already"] if there else []
    return "; ".join(parts)
