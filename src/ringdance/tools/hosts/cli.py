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
from ringdance.launch.subcommands import Subcommand
from ringdance.tools.hosts import files
from ringdance.tools.hosts.copy import Copy, Outcome
from ringdance.tools.hosts.host_set import HostSet, add_arguments, host_set
from ringdance.tools.hosts.progress import CopyProgress

_EPILOG = """\
examples:
  ringdance hosts copy -H node1,node2,node3 data /scratch/data   the directory becomes /scratch/data
  ringdance hosts copy -H node1,node2 train.py /scratch/         into a directory, by its own name
  ringdance hosts copy --hostfile hosts train.py                 to the same path as here

Without -H and --hostfile the hosts are those allocated by a scheduler: a Slurm or LSF job's, the workers of
an MPIJob or TrainJob, the hosts of a SageMaker job. They need what `ringdance run` needs: ssh without a
password, and this Python environment at the same path.

Each file is written under another name, checked (SHA-256) and then renamed: it is complete or absent.
An interrupted copy is resumed by the same command. Nothing is removed on the hosts. This machine sends once,
by ssh. From host to host the bytes go over TCP, not encrypted, like MPI's; --direct avoids that.

exit code: 0 if everything is on all hosts, else 1"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance hosts`` with the words after it; returns the exit code."""
    text = "copy a file or a directory to all hosts, each passing it on"
    known = {"copy": Subcommand(_run, text, _add_arguments, _EPILOG)}
    return subcommands.run("ringdance hosts", "Copy files to hosts.", known, argv)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="a file or a directory on this machine")
    text = (
        "its path on the hosts, or with a / at the end the directory into which it goes "
        "(default: the same path as here)"
    )
    add("destination", metavar="DST", nargs="?", help=text)
    text = "compare contents; otherwise files of equal size and time are equal"
    add("--checksum", action="store_true", help=text)
    add("--direct", action="store_true", help="send to each host from here by ssh, nothing from host to host")
    add("--json", action="store_true", help="as JSON")
    add_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    with closing(host_set(arguments)) as hosts:
        return _copy(arguments, hosts)


def _copy(arguments: argparse.Namespace, hosts: HostSet) -> int:
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
        sys.stdout.flush()
        for host, one in outcomes.items():
            if one.failed:
                print(f"ringdance hosts: host {host}: {one.problem or one.bad[0]}", file=sys.stderr)
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
