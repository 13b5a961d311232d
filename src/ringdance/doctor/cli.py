"""The command ``ringdance doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ringdance.cluster.hostfile import NAME, merge, parse_hostfile, parse_hosts
from ringdance.doctor import report, saved
from ringdance.doctor.preflight import examined
from ringdance.doctor.probe import PROBES, QUICK
from ringdance.doctor.registry import SEVERITIES, Wanted, all_checks
from ringdance.doctor.waiting import Waiting
from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser
from ringdance.launch.remote.shell import add_ssh_options, remote_shell_of

_EPILOG = """\
examples:
  ringdance doctor                              look at this machine
  ringdance doctor -H node1:4,node2:4           at these hosts, over ssh, and at the network between them
  ringdance doctor --folder logs --slots 8      is this machine ready for 8 ranks that write there?
  ringdance doctor --check shm-size             one check only
  ringdance doctor --save good.json             on a good day; later: ringdance doctor --diff good.json
  ringdance doctor --list                       all checks, and what they look at

exit code: 0 if nothing is wrong (notes do not count), 1 if something is, 2 if the command was not understood.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="ringdance doctor",
        description="Look for what makes training fail, hang or crawl, and say the line that mends it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H1[:N],H2[:M]", help="these hosts, with their slots")
    where.add_argument("--hostfile", metavar="FILE", help="the same from a file, as for `ringdance run`")
    add_ssh_options(made)
    add = made.add_argument
    add("--slots", type=int, default=0, metavar="N", help="ranks that each host is to hold")
    add("--folder", action="append", default=[], metavar="DIR", help="for logs or checkpoints; repeatable")
    add("--check", action="append", default=[], metavar="NAME", help="this check only; repeatable")
    add("--quick", action="store_true", help="import no framework, start no ranks, measure no links")
    add("--seconds", type=float, default=120.0, metavar="S", help="time for looking (default 120)")
    add("--format", choices=("text", "json"), default="text", help="default: text")
    add("--verbose", action="store_true", help="show also what is in order")
    add("--save", default="", metavar="FILE", help="write what was found to a file")
    add("--diff", default="", metavar="FILE", help="show what has changed since --save wrote the file")
    add("--list", action="store_true", help="print all checks and end")
    return made


def main(argv: Sequence[str]) -> int:
    """``ringdance doctor``: `argv` without the program and ``doctor``; returns the exit code."""
    arguments = parser().parse_args(list(argv))
    try:
        return _main(arguments)
    except LaunchError as error:
        print(f"ringdance doctor: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ringdance doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        print(report.listing(arguments.format))
        return 0
    unknown = [name for name in arguments.check if name not in all_checks()]
    if unknown:
        raise LaunchError(f"there is no check {unknown[0]!r}; all names: ringdance doctor --list")
    old = saved.load(arguments.diff) if arguments.diff else None
    slots, several = _slots(arguments)
    wanted = Wanted(
        slots={host: count for host, count in slots.items() if count},
        folders=tuple(os.path.abspath(folder) for folder in arguments.folder),
        hosts=tuple(slots) if several else (),
        here=os.getcwd(),
    )
    probes, measured = _probes(arguments.check, arguments.quick)
    with Waiting() as waiting:
        facts, results = examined(
            tuple(slots),
            wanted,
            probes,
            arguments.seconds,
            remote_shell_of(arguments),
            arguments.check or None,
            30.0 if measured else 0.0,
            waiting,
        )
    if arguments.save:
        saved.save(arguments.save, facts, results)
    changed = saved.changes(old, facts, results) if old is not None else None
    if arguments.format == "json":
        print(report.as_json(facts, results, changed))
    elif changed is not None:
        print("\n".join(changed) or f"nothing has changed since {arguments.diff} was written")
    else:
        print(report.as_text(list(facts), results, verbose=arguments.verbose or bool(arguments.check)))
    return int(any(result.severity in SEVERITIES[:2] for result in results))


def _slots(arguments: argparse.Namespace) -> tuple[dict[str, int], bool]:
    """Hosts with their slots (0: not known), and whether any were named; this machine if not.

    Raises:
        LaunchError: what was named cannot be understood.
    """
    if arguments.hostfile:
        return dict(parse_hostfile(arguments.hostfile)), True
    if not arguments.hosts:
        return {os.uname().nodename: arguments.slots}, False
    found: list[tuple[str, int]] = []
    for entry in arguments.hosts.split(","):
        if NAME.fullmatch(entry.strip()):
            found.append((entry.strip(), arguments.slots))
        else:
            found += parse_hosts(entry)
    return dict(merge(found)), True


def _probes(names: Sequence[str], quick: bool) -> tuple[list[str], bool]:
    """The probes that the named checks need, all checks' without names; and whether links are measured."""
    if not names:
        return list(QUICK if quick else PROBES), not quick
    needed = {probe for name in names for probe in all_checks()[name].needs}
    # The links are measured by the addresses of the interfaces.
    needed |= {"network"} if "links" in needed else set()
    return [probe for probe in PROBES if probe in needed], "links" in needed
