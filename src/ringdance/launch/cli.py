"""The command line of ``ringdance run``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ringdance.errors import LaunchError
from ringdance.launch.hosts import parse_hostfile, parse_hosts
from ringdance.launch.order import Order, as_program, parse_exports, resolve_command, run_in_terminal
from ringdance.launch.output import Style

_EPILOG = """\
examples:
  ringdance run -np 2 python train.py --epochs 3
  ringdance run -np 4 --output-filename logs python train.py      logs/rank.0/stdout, ...
  ringdance run -np 2 -x OMP_NUM_THREADS=4 python -m package.train
  ringdance run -np 2 --dry-run python train.py                   show the plan, start nothing

`python` is the interpreter that ringdance is installed in. Each output line is shown as `[rank] text`.
Each rank gets its share of the cores as OMP_NUM_THREADS, unless that is set.

exit code: 0 if all ranks ended with 0; else that of the rank that failed first (128 + n if signal n
killed it); 2 if nothing was started, 127 if the command was not found; 130 after Ctrl-C.
Under mpiexec or srun run the script directly: it needs no `ringdance run`.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringdance run",
        usage="ringdance run -np N [options] COMMAND [ARGUMENTS...]",
        description="Run a command as N ranks of one MPI job on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks (default: the slots of -H)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="localhost:SLOTS (so far one machine)")
    where.add_argument("--hostfile", metavar="FILE", help="the same from a file of lines `HOST slots=N`")
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for the ranks",
    )
    add("--output-filename", metavar="DIR", help="also write DIR/rank.<r>/stdout and stderr")
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="begin each output line with [rank] (default)",
    )
    add("--timestamps", action="store_true", help="begin each output line with the time")
    add(
        "--start-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds until all ranks must have started (default 60)",
    )
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--json", action="store_true", help="with --dry-run: print it as JSON")
    add("--verbose", action="store_true", help="tell what is done, and show all that mpiexec says")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    return parser


def main(argv: Sequence[str]) -> int:
    """``ringdance run``: `argv` without the program and ``run``; returns the exit code."""
    return as_program("ringdance run", lambda: _main(_parser().parse_args(list(argv))))


def _main(arguments: argparse.Namespace) -> int:
    order = _order(arguments)
    plan = order.plan()
    if arguments.dry_run:
        print(plan.to_json() if arguments.json else plan.describe())
        return 0
    return run_in_terminal(order, plan)


def _order(arguments: argparse.Namespace) -> Order:
    hosts = None
    if arguments.hosts:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile:
        hosts = parse_hostfile(arguments.hostfile)
    elif arguments.num_proc is None:
        raise LaunchError("how many ranks? Give -np N, for example: ringdance run -np 2 python train.py")
    return Order(
        resolve_command(arguments.command),
        ranks=arguments.num_proc,
        hosts=hosts,
        exports=parse_exports(arguments.env, os.environ),
        style=Style("[{rank}] " if arguments.prefix else "", clock=arguments.timestamps),
        folder=arguments.output_filename or "",
        start_timeout=arguments.start_timeout,
        verbose=arguments.verbose,
    )
