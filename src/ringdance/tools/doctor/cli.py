"""The command line of ``ringdance doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from ringdance.errors import LaunchError
from ringdance.host.schedulers.detect import detect
from ringdance.launch.hosts import several
from ringdance.launch.parser import Parser, as_program
from ringdance.launch.remote.shell import add_host_options, hosts_of, remote_shell_of
from ringdance.tools.doctor import report
from ringdance.tools.doctor.check import AREAS, SEVERITIES, Usage
from ringdance.tools.doctor.examine import CHECKS, collect, examine
from ringdance.tools.doctor.probe import PROBES, QUICK
from ringdance.tools.hosts.host_set import of_hosts

_CONNECT_S, _PROBES_S = 20.0, 120.0
_EPILOG = """\
examples:
  ringdance doctor                              check this machine
  ringdance doctor -H node1:4,node2:4           check these hosts, over ssh, and compare them
  ringdance doctor --folder logs --slots 8      is this machine ready for 8 ranks that write to logs?
  ringdance doctor --check shm-size             run only one check
  ringdance doctor --list                       list all checks

exit code: 0 if there are no problems (notes do not count), 1 if there are, 2 if the command line is invalid.
"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = Parser(
        prog="ringdance doctor",
        description="Find problems that make training fail or hang, and show how to fix them.",
        epilog=_EPILOG,
    )
    add_host_options(made)
    add = made.add_argument
    add("--slots", type=int, default=0, metavar="N", help="number of ranks that will run on each host")
    add(
        "--folder", dest="directories", action="append", default=[], metavar="DIR",
        help="directory for logs or checkpoints; repeatable",
    )  # fmt: skip
    add("--check", action="append", default=[], metavar="NAME", help="check or area to run; repeatable")
    add("--quick", action="store_true", help="do not import frameworks or start ranks")
    add("--json", action="store_true", help="print JSON")
    add("--verbose", action="store_true", help="also show the checks that passed")
    add("--list", action="store_true", help="print all checks and exit")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance doctor`` with the arguments ``argv``. Return the exit code."""
    return as_program("ringdance doctor", lambda: _main(parser().parse_args(list(argv))))


def _main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        report.print_checks()
        return 0
    if unknown := [word for word in arguments.check if word not in (*CHECKS, *AREAS)]:
        raise LaunchError(f"unknown check {unknown[0]!r}. To list all checks, run: ringdance doctor --list")
    checks = [check.name for check in CHECKS.values() if {check.name, check.area} & {*arguments.check}]
    hosts = of_hosts(_slots(arguments), remote_shell_of(arguments))
    slots = hosts.slots
    usage = Usage(
        slots={host: count for host, count in slots.items() if count},
        directories=tuple(map(os.path.abspath, arguments.directories)),
        hosts=tuple(slots) if arguments.hosts or arguments.hostfile else (),
        cwd=os.getcwd(),
    )
    probes = _probes(checks, arguments.quick)
    with Progress(
        TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        slow = ", importing frameworks" if "frameworks" in probes else ""
        line = progress.add_task("connecting", total=None)
        with closing(hosts):
            hosts.connect(_CONNECT_S, lambda text: progress.update(line, description=text))
            progress.update(line, description=f"checking {several(hosts.names, 4)}{slow}")
            facts = collect(hosts, probes, usage, _PROBES_S)
    results = examine(facts, usage, checks or None)
    if arguments.json:
        print(json.dumps({"results": [asdict(result) for result in results], "facts": facts}, indent=2))
    else:
        report.print_text(list(facts), results, verbose=arguments.verbose or bool(checks))
    return int(any(result.severity in SEVERITIES[:2] for result in results))


def _slots(arguments: argparse.Namespace) -> Sequence[tuple[str, int]]:
    """Return the hosts given on the command line (default: this machine) and their slots (0 if unknown).

    Raises:
        LaunchError: A host name or a host file is invalid.
    """
    hosts = hosts_of(arguments, arguments.slots) or [(os.uname().nodename, arguments.slots)]
    if not (arguments.hosts or arguments.hostfile) and (job := detect(os.environ)) and len(job.hosts) > 1:
        names = ",".join(name for name, _ in job.hosts)
        text = f"checking only this host. To check all hosts of {job.source}, pass -H {names}"
        print(f"ringdance doctor: {text}", file=sys.stderr)
    return hosts


def _probes(names: Sequence[str], quick: bool) -> list[str]:
    """Return the probes that the checks in ``names`` need, or all probes if ``names`` is empty."""
    if not names:
        return list(QUICK if quick else PROBES)
    needed = {probe for name in names for probe in CHECKS[name].needs}
    return [probe for probe in PROBES if probe in needed]
