"""The subcommands of ``ringdance hosts``: each prints what it finds and returns the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from ringdance.errors import LaunchError
from ringdance.hosts import files
from ringdance.hosts.copy import Copy, Outcome
from ringdance.hosts.host_set import HostSet
from ringdance.hosts.progress import CopyProgress
from ringdance.hosts.run import Result, Run, exit_code, grouped
from ringdance.launch.directories import bases
from ringdance.launch.output.merge import spans
from ringdance.launch.plan import devices_text, table


def _ask(hosts: HostSet, message: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the answers of the hosts that succeeded; what is wrong with the others is noted."""
    answers = hosts.ask(dict.fromkeys(hosts.connected, message))
    hosts.problems |= {host: answer["problem"] for host, answer in answers.items() if answer["problem"]}
    return {host: answer for host, answer in answers.items() if not answer["problem"]}


def _print_problems(problems: Mapping[str, str]) -> int:
    """Print what is wrong with each host; return the exit code."""
    sys.stdout.flush()
    for host, problem in problems.items():
        print(f"ringdance hosts: host {host}: {problem}", file=sys.stderr)
    return int(bool(problems))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def list_hosts(arguments: argparse.Namespace, hosts: HostSet) -> int:
    """Show hosts, whether they answer, and the user's ranks there."""
    hosts.connect(arguments.connect_timeout)
    jobs = {host: answer["jobs"] for host, answer in _ask(hosts, {"task": "jobs"}).items()}
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


def run(arguments: argparse.Namespace, hosts: HostSet) -> int:
    """Run a command on every host."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise LaunchError("missing command, for example: ringdance hosts run -H node1,node2 -- uptime")
    hosts.connect(arguments.connect_timeout)
    live = arguments.live and not arguments.json
    command = Run(hosts, _print_line if live else None)
    command.start(words, arguments.directory)
    with Console(stderr=True, quiet=live).status("") as status:
        results = command.wait(
            arguments.timeout, lambda left: status.update(f"waiting for {', '.join(left[:5])}")
        )
    if arguments.json:
        rows = [
            {"host": host, **dataclasses.asdict(result), "output": result.output.decode(errors="replace")}
            for host, result in results.items()
        ]
        print(json.dumps(rows, indent=2))
    elif live:
        failed = {host: result for host, result in results.items() if result.code}
        _print_problems({host: one.problem or f"exit code {one.code}" for host, one in failed.items()})
    else:
        _print_results(results)
    return exit_code(results)


def _print_line(host: str, line: bytes) -> None:
    _print_output(f"<{host}> ".encode() + line + b"\n" * (not line.endswith((b"\n", b"\r"))))


def _print_output(output: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def _print_results(results: Mapping[str, Result]) -> None:
    """Print each result once, below the hosts that have it."""
    for names, result in grouped(results):
        head = names[0] if len(names) == 1 else f"{len(names)} hosts: {', '.join(names)}"
        code = f" (exit code {result.code})" if result.code and not result.problem else ""
        print(f"== {head}{code}")
        output = bytes(result.output)
        _print_output(output + b"\n" * (not output.endswith(b"\n") and bool(output)))
        if result.problem:
            print(f"-- {result.problem}")


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


def kill(arguments: argparse.Namespace, hosts: HostSet) -> int:
    """End a job's processes."""
    if not re.fullmatch(r"[0-9a-f]{4,32}", arguments.job):
        raise LaunchError(
            f"{arguments.job!r} is not a job's name: give at least 4 of its digits, as shown by "
            "`ringdance hosts list`"
        )
    hosts.connect(arguments.connect_timeout)
    found = _ask(hosts, {"task": "jobs"})
    known = {job for answer in found.values() for job in answer["jobs"]}
    matching = [job for job in known if job.startswith(arguments.job)]
    if len(matching) > 1:
        raise LaunchError(f"{arguments.job} could be {' or '.join(sorted(matching))}: give more digits")
    if not matching:
        _print_problems(hosts.problems)
        others = ", ".join(sorted(job[:8] for job in known)) or "none"
        count = _count(len(found), "host")
        raise LaunchError(f"no job {arguments.job} runs on {count}; jobs there: {others}")
    for host, answer in _ask(hosts, {"task": "kill", "job": matching[0], "bases": bases(os.environ)}).items():
        print(f"{host}: {_count(answer['processes'], 'process', 'es')} of job {matching[0][:8]} ended")
    return _print_problems(hosts.problems)
