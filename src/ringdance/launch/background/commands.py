"""The commands ``ringdance status``, ``attach`` and ``stop``: jobs in the background."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ringdance.errors import LaunchError
from ringdance.launch.background import records
from ringdance.launch.output.stream import write_all
from ringdance.launch.parser import Parser
from ringdance.launch.plan import table
from ringdance.launch.spec import as_program
from ringdance.launch.system import linux

_LOOK_S = 0.1
_HARD_S = 10.0


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    made = Parser(
        prog=f"ringdance {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "job", metavar="JOB", nargs="?", default="", help="the job, or the first digits of its name"
    )
    return made


def status_parser() -> argparse.ArgumentParser:
    """The command line of ``ringdance status``."""
    made = _parser(
        "status",
        "Show the jobs that were started with `ringdance run --detach`.",
        "examples:\n  ringdance status\n  ringdance status 3f2a91c0 --format json\n\n"
        "exit code: 0; with JOB 0 if it runs or has ended well, else its exit code",
    )
    made.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    return made


def status(argv: Sequence[str]) -> int:
    """``ringdance status``: `argv` without the program and its name; returns the exit code."""

    def action() -> int:
        arguments = status_parser().parse_args(list(argv))
        found = [records.find(arguments.job)] if arguments.job else records.every()
        if arguments.format == "json":
            entries = [{**asdict(record), "state": record.state, "ranks": record.ranks} for record in found]
            print(json.dumps(entries, indent=2))
        elif found:
            rows = [("job", "state", "started", "ranks", "hosts", "command"), *map(_row, found)]
            print("\n".join(table(rows)))
        else:
            print("no jobs; `ringdance run --detach` starts one in the background")
        return (found[0].code or int(found[0].state == "lost")) if arguments.job else 0

    return as_program("ringdance status", action)


def _row(record: records.Record) -> tuple[str, ...]:
    state = record.state
    if state == "ended":
        state = f"ended: {record.code}" if record.code else "ended well"
    elif state == "elsewhere":
        state = f"on {record.machine[0]}"
    names = [name for name, _ in record.hosts]
    hosts = ",".join(names[:3]) + (f",... ({len(names)})" if names[3:] else "")
    words = shlex.join([os.path.basename(record.command[0]), *record.command[1:]])
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    return record.short, state, began, str(record.ranks), hosts, words


def attach_parser() -> argparse.ArgumentParser:
    """The command line of ``ringdance attach``."""
    made = _parser(
        "attach",
        "Show the output of a job in the background until it ends. Ctrl-C leaves it running.",
        "examples:\n  ringdance attach                      the newest job that runs, from the beginning\n"
        "  ringdance attach 3f2a91c0 --from now\n\n"
        "exit code: that of the job; 130 after Ctrl-C",
    )
    made.add_argument(
        "--from", choices=("start", "now"), default="start", dest="begin", help="default: start"
    )
    return made


def attach(argv: Sequence[str]) -> int:
    """``ringdance attach``: `argv` without the program and its name; returns the exit code."""

    def action() -> int:
        arguments = attach_parser().parse_args(list(argv))
        record = records.find(arguments.job)
        try:
            return _follow(record, arguments.begin == "start")
        except KeyboardInterrupt:
            print(f"ringdance attach: job {record.short} goes on", file=sys.stderr)
            return 130

    return as_program("ringdance attach", action)


def _follow(record: records.Record, start: bool) -> int:
    try:
        reader = records.Reader(record, start)
    except OSError as error:
        raise LaunchError(f"job {record.short} has no output: {error}") from None
    sinks = {1: write_all(1), 2: write_all(2)}
    while True:
        over = record.state in ("ended", "lost")
        for stream, data in reader.read(over):
            sinks[stream](data)
        if over:
            break
        time.sleep(_LOOK_S)
    record = record.fresh()
    if record.code is None:
        raise LaunchError(f"the launcher of job {record.short} (pid {record.pid}) was killed")
    return record.code


def stop_parser() -> argparse.ArgumentParser:
    """The command line of ``ringdance stop``."""
    made = _parser(
        "stop",
        "End a job in the background: its ranks get SIGTERM, and after some seconds they are killed.",
        "examples:\n  ringdance stop 3f2a91c0\n"
        "  ringdance stop 3f2a91c0 --grace 60      it needs time to save\n\n"
        "exit code: 0 if it is over, also if it was before",
    )
    made.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="seconds before ranks are killed (default 10)"
    )
    return made


def stop(argv: Sequence[str]) -> int:
    """``ringdance stop``: `argv` without the program and its name; returns the exit code."""

    def action() -> int:
        arguments = stop_parser().parse_args(list(argv))
        if not arguments.job:
            raise LaunchError("which job? `ringdance status` shows all")
        record = records.find(arguments.job)
        if record.state == "elsewhere":
            raise LaunchError(f"job {record.short} was started on {record.machine[0]}; stop it there")
        if record.state == "running":
            how = _stop(record, arguments.grace)
            print(f"job {record.short}: {how}")
        else:
            print(f"job {record.short} was over already")
        return 0

    return as_program("ringdance stop", action)


def _stop(record: records.Record, grace: float) -> str:
    """Orderly, then hard; how it ended.

    Raises:
        LaunchError: it does not end.
    """

    def over() -> bool:
        return record.state != "running"

    for number, seconds, how in (
        (signal.SIGTERM, grace, "has ended"),
        (signal.SIGTERM, _HARD_S, f"was killed after {grace:g} s"),  # the second ends all at once
        (signal.SIGKILL, _HARD_S, "was killed, with its launcher"),  # guardian and agents end the rest
    ):
        if linux.start_of(record.pid) == record.mark:
            try:
                os.kill(record.pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                raise LaunchError(f"job {record.short} belongs to another user") from None
        if _wait(over, seconds):
            return how
    raise LaunchError(f"its launcher (pid {record.pid}) does not end: it waits for a disk or a device?")


def _wait(over: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not over():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True
