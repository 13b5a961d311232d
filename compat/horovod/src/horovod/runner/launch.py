"""``horovodrun`` and ``python -m horovod.runner.launch``: Horovod's command line for our launcher."""

from __future__ import annotations

import argparse
import sys

from horovod.runner.build import check_build
from horovod.runner.options import parse_args
from horovod.runner.request import order_of, tell
from ringdance.launch.cli import refuse_within_a_rank
from ringdance.launch.parser import as_program
from ringdance.launch.prepare import prepare
from ringdance.launch.spec import CommandError, refuse_launcher, resolve_command
from ringdance.launch.terminal import run_in_terminal
from ringdance.tools.cli import open_standard_streams

__all__ = ["check_build", "parse_args", "run_commandline"]


def run_commandline() -> int:
    """Run this process's command line. Return the exit code."""
    open_standard_streams()
    return as_program("horovodrun", _main)


def _main() -> int:
    try:
        args = parse_args()
        if args.check_build:
            print(check_build(args.verbose))
            return 0
        return _run(args)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _run(args: argparse.Namespace) -> int:
    refuse_within_a_rank()
    refuse_launcher(args.command)
    order = order_of(args, resolve_command(args.command))
    ready = prepare(order, _say)
    tell(args, ready.spec, _say)
    if ready.plan.multi_host:
        from ringdance.tools.doctor.preflight import check_hosts

        # Only warn: Horovod starts whatever it can reach, and has no option to continue despite an error.
        check_hosts(ready, _say, required=False)
    return run_in_terminal(ready)


def _say(line: str) -> None:
    print(f"horovodrun: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_commandline())
