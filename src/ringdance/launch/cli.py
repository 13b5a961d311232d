"""The command line of ``ringdance run``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.launch.cause import Verdict, render
from ringdance.launch.job import Job, Options
from ringdance.launch.linux import usable_cores
from ringdance.launch.mpi import find_mpi
from ringdance.launch.plan import Plan, build_plan, parse_hosts
from ringdance.launch.running import write_all

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


class CommandError(LaunchError):
    """The user's command cannot be run; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


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
    add("-H", "--hosts", metavar="HOST:SLOTS", help="localhost:SLOTS (this version: one machine)")
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
    parser = _parser()
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as end:  # argparse has said what is wrong, or shown the help
        return int(end.code or 0)
    try:
        plan = _plan(arguments)
        if arguments.dry_run:
            print(plan.to_json() if arguments.json else plan.describe())
            return 0
        return _run(plan, arguments)
    except LaunchError as error:
        print(f"ringdance run: {error}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:  # before the job's own handling
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `ringdance run ... | head`
        # Else the interpreter complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _plan(arguments: argparse.Namespace) -> Plan:
    hosts = parse_hosts(arguments.hosts) if arguments.hosts else None
    ranks = arguments.num_proc if arguments.num_proc is not None else sum(slots for _, slots in hosts or [])
    if arguments.num_proc is None and not hosts:
        raise LaunchError("how many ranks? Give -np N, for example: ringdance run -np 2 python train.py")
    return build_plan(
        resolve_command(arguments.command),
        ranks=ranks,
        mpi=find_mpi(),
        cores=usable_cores(),
        environ=os.environ,
        hosts=hosts,
        exports=parse_exports(arguments.env, os.environ),
        hostname=os.uname().nodename,
        root=os.getuid() == 0,
    )


def _run(plan: Plan, arguments: argparse.Namespace) -> int:
    folder = Path(arguments.output_filename) if arguments.output_filename else None
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--output-filename {folder}: {error.strerror}") from None
    if arguments.verbose:
        print(plan.describe(), file=sys.stderr)
    sys.stdout.flush()
    options = Options(
        out=write_all(1),
        err=write_all(2),
        prefix=arguments.prefix,
        folder=folder,
        start_timeout=arguments.start_timeout,
        verbose=arguments.verbose,
        # Not a terminal: a prompt would wait for its line's end, a job in the background take its input.
        stdin=-1 if sys.stdin is None or sys.stdin.isatty() else 0,
    )
    outcome = Job(plan, options).run()
    if isinstance(outcome, Verdict):
        print(render(outcome, plan.ranks, str(folder or "")), file=sys.stderr, flush=True)
        return outcome.code
    return outcome


def parse_exports(texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` for the value it has in `environ`.

    Raises:
        CommandError: ``NAME`` alone that is not set, or no name.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environ):
            raise CommandError(
                f"-x {text}: " + ("that variable is not set here" if name else "the name is missing")
            )
        found[name] = value if equals else environ[name]
    return found


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command with its program's path; checked, so that mistakes are told once and before the start.

    Raises:
        CommandError: no command, not found (code 127), not executable, or a Python script that is missing.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise CommandError("what is to be run? For example: ringdance run -np 2 python train.py")
    program = command[0]
    if program in ("python", "python3"):
        path: str | None = sys.executable
    else:
        path = shutil.which(program)
    if path is None:
        if os.path.isdir(program) or os.path.isfile(program):
            hint = f"; did you mean `python {program}`?" if program.endswith(".py") else ""
            raise CommandError(f"{program} is not an executable program{hint}")
        raise CommandError(f"command not found: {program}", 127)
    if os.path.basename(path).startswith("python"):
        script = _script(command[1:])
        if script and not os.path.exists(script):
            raise CommandError(f"no such script: {script} (in {os.getcwd()})")
    return [os.path.abspath(path), *command[1:]]


def _script(arguments: Sequence[str]) -> str | None:
    """The script among the arguments of a Python interpreter; None for -m, -c and standard input."""
    rest = iter(arguments)
    for word in rest:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif word == "-" or word.startswith(("-m", "-c")):
            return None
        elif not word.startswith("-"):
            return word
    return None
