"""``ringdance status``, ``attach`` and ``stop``: the commands for background jobs."""

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
from functools import partial
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.background import records
from ringdance.launch.output.stream import write_all
from ringdance.launch.parser import Parser, as_program
from ringdance.launch.plan import table

_POLL_S = 0.1
_KILL_S = 10.0

_HEAD = ("job", "state", "started", "ranks", "hosts", "directory", "command")

_COMMANDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "status": (
        "Show the jobs that are running here, and all jobs started with `ringdance run --detach`.",
        "examples:\n  ringdance status\n  ringdance status 3f2a91c0 --json\n\n"
        "exit code: 0; with JOB, 0 if the job is running or has completed, otherwise the job's exit code",
        "--json",
        {"action": "store_true", "help": "print the jobs as JSON"},
    ),
    "attach": (
        "Show the output of a job in the background until it ends. Ctrl-C leaves it running.",
        "examples:\n  ringdance attach                      the newest running job\n"
        "  ringdance attach 3f2a91c0\n\n"
        "exit code: the job's exit code; 130 after Ctrl-C",
        "",
        {},
    ),
    "stop": (
        "Stop a background job: its ranks receive SIGTERM, and SIGKILL if they do not exit in time.",
        "examples:\n  ringdance stop                        the job, if only one is running\n"
        "  ringdance stop 3f2a91c0\n"
        "  ringdance stop 3f2a91c0 --grace 60      if it needs time to save\n\n"
        "exit code: 0 if the job has ended",
        "--grace",
        {"type": float, "metavar": "S", "help": "seconds until SIGKILL (default: the job's --grace, or 30)"},
    ),
}
"""By command name: description, epilog, and an option, if any, with its arguments for add_argument()."""


def _run(name: str, command: Callable[[argparse.Namespace], int], argv: Sequence[str]) -> int:
    description, epilog, option, details = _COMMANDS[name]
    parser = Parser(prog=f"ringdance {name}", description=description, epilog=epilog)
    parser.add_argument("job", metavar="JOB", nargs="?", default="", help="job ID or a unique prefix of it")
    if option:
        parser.add_argument(option, **details)
    return as_program(f"ringdance {name}", lambda: command(parser.parse_args(list(argv))))


def _status(arguments: argparse.Namespace) -> int:
    here = records.without_record()
    named = [record for record in here if arguments.job and record.job.startswith(arguments.job)]
    selected = named or ([records.find(arguments.job)] if arguments.job else [*records.load_all(), *here])
    if arguments.json:
        entries = [{**asdict(record), "state": record.state, "ranks": record.ranks} for record in selected]
        print(json.dumps(entries, indent=2))
    elif selected:
        text = "\n".join(table([_HEAD, *map(_row, selected)]))
        print(text.encode(errors="backslashreplace").decode())  # arguments might not be UTF-8
    else:
        print("no jobs found. To start a job in the background, use `ringdance run --detach`.")
    return (selected[0].code or int(selected[0].state == "lost")) if arguments.job else 0


def _row(record: records.Record) -> tuple[str, ...]:
    state = record.state
    if state == "ended":
        state += f", exit code {record.code}" if record.code else ""
    elif state == "elsewhere":
        state = f"on {record.launcher_host}"
    names = list(record.hosts)
    hosts = ",".join(names[:3]) + (f",... ({len(names)})" if names[3:] else "")
    words = shlex.join([os.path.basename(record.command[0]), *record.command[1:]])
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.began))
    return record.short, state, began, str(record.ranks), hosts, record.cwd, words


def _attach(arguments: argparse.Namespace) -> int:
    record = records.find(arguments.job)
    if record.state == "elsewhere":
        text = f"job {record.short} is running on {record.launcher_host}. If the job's launcher is killed,"
        print(f"ringdance attach: {text} only that host can detect it", file=sys.stderr)
    show, at, ended = write_all(1), 0, False
    try:
        while not ended:
            ended = record.state in ("ended", "lost")
            # Reopen the file each time: on NFS, only a newly opened file is sure to show everything that
            # another machine has written (close-to-open consistency).
            with open(record.directory / "log", "rb") as log:
                log.seek(at)
                while data := log.read(1 << 20):
                    show(data)
                at = log.tell()
            time.sleep(0 if ended else _POLL_S)
    except FileNotFoundError as error:
        raise LaunchError(f"the output of job {record.short} is missing: {error}") from None
    except KeyboardInterrupt:
        print(f"ringdance attach: job {record.short} is still running", file=sys.stderr)
        return 130
    code = record.reload().code
    if code is None:
        launcher = f"the launcher of job {record.short} (pid {record.pid} on {record.launcher_host})"
        raise LaunchError(f"{launcher} was killed, or its machine was restarted")
    return code


def _stop(arguments: argparse.Namespace) -> int:
    """Stop a job: send SIGTERM, then SIGINT, which makes the launcher kill the ranks, then SIGKILL."""
    running = [record for record in records.load_all() if record.state == "running"]
    if not arguments.job and len(running) != 1:
        jobs = "\n  ".join(["several jobs are running. Specify one:", *(record.about for record in running)])
        raise LaunchError(jobs if running else "no job is running in the background. See `ringdance status`.")
    record = records.find(arguments.job)
    if record.state == "elsewhere":
        raise LaunchError(
            f"job {record.short} was started on {record.launcher_host}. Run `ringdance stop` on that host."
        )
    outcome, grace = "had already ended", record.grace if arguments.grace is None else arguments.grace
    for number, seconds, after in (
        (signal.SIGTERM, grace, "has ended"),
        (signal.SIGINT, _KILL_S, f"was killed after {grace:g} s"),
        (signal.SIGKILL, _KILL_S, "was killed together with its launcher"),  # the agents then kill the ranks
    ):
        if record.state != "running":
            break
        try:
            os.kill(record.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise LaunchError(f"job {record.short} belongs to another user, who must stop it") from None
        until, outcome = time.monotonic() + seconds, after
        while record.state == "running" and time.monotonic() < until:
            time.sleep(_POLL_S)
    if record.state == "running":
        raise LaunchError(f"the launcher (pid {record.pid}) survived SIGKILL. It may be blocked in I/O.")
    print(f"job {record.short} {outcome}")
    return 0


# Each of these functions takes the arguments after the command's name and returns the exit code.
status = partial(_run, "status", _status)
attach = partial(_run, "attach", _attach)
stop = partial(_run, "stop", _stop)
