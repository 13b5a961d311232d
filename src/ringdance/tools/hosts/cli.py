"""The command line of ``ringdance hosts``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from rich.filesize import decimal

from ringdance.launch import subcommands
from ringdance.launch.hosts import counted
from ringdance.launch.subcommands import Subcommand
from ringdance.tools.hosts import files
from ringdance.tools.hosts.copy import Copy, Outcome
from ringdance.tools.hosts.host_set import add_arguments, host_set
from ringdance.tools.hosts.progress import CopyProgress

_EPILOG = """\
examples:
  ringdance hosts copy -H node1,node2,node3 data /scratch/data   the directory becomes /scratch/data
  ringdance hosts copy -H node1,node2 train.py /scratch/         into a directory, under its own name
  ringdance hosts copy --hostfile hosts train.py                 to the same path as here

Without -H and --hostfile, the command uses the hosts that a scheduler has allocated. As with `ringdance run`,
the hosts need passwordless ssh and this Python environment at the same path.

Each file is written under a temporary name, checked (SHA-256) and then renamed, so it is complete or absent.
Run the same command again to resume an interrupted copy. Nothing is removed on the hosts. This machine sends
the data once, over ssh. The hosts forward it to each other over TCP, which is not encrypted. With --direct,
this machine sends the data to each host over ssh instead.

exit code: 0 if the copy is complete on all hosts, otherwise 1"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance hosts`` with the arguments ``argv``. Returns the exit code."""
    text = "copy a file or a directory to all hosts; each host forwards it to the next"
    known = {"copy": Subcommand(_run, text, _add_arguments, _EPILOG)}
    return subcommands.run("ringdance hosts", "Copy files to hosts.", known, argv)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="a file or a directory on this machine")
    text = (
        "path on the hosts; if it ends with /, the directory that receives SRC "
        "(default: the same path as here)"
    )
    add("destination", metavar="DST", nargs="?", help=text)
    text = "compare contents; by default, files with equal size and modification time count as identical"
    add("--checksum", action="store_true", help=text)
    add("--direct", action="store_true", help="send to each host directly over ssh, not from host to host")
    add("--json", action="store_true", help="print JSON")
    add_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    hosts = host_set(arguments)
    destination = arguments.destination or os.path.abspath(arguments.source)
    source = files.collect(arguments.source, destination, arguments.checksum)
    for path in source.skipped:
        print(f"ringdance hosts: skipped {path}, which is not a file, directory or link", file=sys.stderr)
    progress = CopyProgress(source.size)
    with closing(hosts):
        hosts.connect(arguments.connect_timeout)
        start = time.monotonic()
        copying = Copy(hosts, source, progress, direct=arguments.direct, checksum=arguments.checksum)
        try:
            outcomes = copying.run()
        except KeyboardInterrupt:
            progress.print("ringdance hosts: interrupted. Run the same command again to resume the copy.")
            raise
        finally:
            progress.stop()
        seconds = time.monotonic() - start
    if arguments.json:
        print(json.dumps([{"host": host, **vars(outcome)} for host, outcome in outcomes.items()], indent=2))
    else:
        print(_summary(outcomes, seconds))
        sys.stdout.flush()
        for host, outcome in outcomes.items():
            if outcome.failed:
                print(f"ringdance hosts: host {host}: {outcome.problem or outcome.bad[0]}", file=sys.stderr)
    return int(any(outcome.failed for outcome in outcomes.values()))


def _summary(outcomes: Mapping[str, Outcome], seconds: float) -> str:
    good = sum(not outcome.failed for outcome in outcomes.values())
    there = min(outcome.there for outcome in outcomes.values())
    size = max(outcome.bytes for outcome in outcomes.values())
    kept = max(outcome.kept for outcome in outcomes.values())
    hosts = counted(len(outcomes), "host")
    written = counted(max(outcome.files for outcome in outcomes.values()), "file")
    where = hosts if good == len(outcomes) else f"{good} of {hosts}"
    parts = [f"{written}, {decimal(size)}, to {where} in {seconds:.1f} s"]
    parts += [f"{decimal(int(size / seconds))}/s to each"] if size > 10e6 else []
    parts += [f"resumed an earlier copy after {decimal(kept)}"] if kept else []
    parts += [f"{there} {'was' if there == 1 else 'were'} already up to date"] if there else []
    return "; ".join(parts)
