"""The command line of ``ringdance run``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from ringdance.errors import LaunchError
from ringdance.launch.background.detach import start as start_detached
from ringdance.launch.output.stream import Style
from ringdance.launch.parser import Parser, as_program, number, rank_count
from ringdance.launch.prepare import Check, Log, PreparedJob, prepare
from ringdance.launch.remote.shell import add_host_options, hosts_of, remote_shell_of
from ringdance.launch.spec import JobSpec, parse_exports, refuse_launcher, resolve_command
from ringdance.launch.terminal import run_in_terminal

_EPILOG = """\
examples:
  ringdance run -np 2 python train.py --epochs 3
  ringdance run -np 4 --output-filename logs python train.py      logs/rank.0/stdout, ...
  ringdance run -np 2 -x OMP_NUM_THREADS=4 python -m package.train
  ringdance run -np 2 --dry-run python train.py                   show the plan, start nothing
  ringdance run -H h1:4,h2:4 python train.py                      four ranks on each of two hosts, over ssh
  ringdance run --hostfile hosts -np 6 python train.py            lines `h1 slots=4` or `h1:4`
  ringdance run -np 4 --autotune --autotune-log-file tune.csv python train.py     then: --tuned tune.json
  ringdance run -np 2 --detach python train.py                    then: ringdance status, attach, stop

Without -H, --hostfile and -np, the job runs on the hosts that a scheduler has allocated (see --dry-run).

`python` is the interpreter that ringdance is installed in. Each output line is shown as `[rank] text`, or as
`[rank]<host> text` if there are several hosts.
OMP_NUM_THREADS is set to each rank's share of the cores, unless you set it yourself.

exit code: 0 if all ranks exited with 0; otherwise the exit code of the rank that failed first (128 + n if
signal n killed it); 2 if nothing was started; 127 if the command was not found; 130 after Ctrl-C.
Under mpiexec or srun, run the script directly, without `ringdance run`.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser for ``ringdance run``."""
    made = Parser(
        prog="ringdance run", usage="ringdance run -np N [options] COMMAND [ARGUMENTS...]",
        description="Run a command as N ranks of one MPI job, on this machine or on several.", epilog=_EPILOG,
    )
    add = made.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks (default: all slots of the hosts)")
    add("-n", type=rank_count, dest="num_proc", help=argparse.SUPPRESS)
    _add_hosts(made)
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable for the ranks")
    add("--output-filename", metavar="DIR", help="copy output to DIR/rank.<r>/, metrics to DIR/metrics-*")
    add("--timeline", default="", metavar="FILE", help="write a timeline for https://ui.perfetto.dev")
    text = "try different values of settings for up to 280 steps, then continue with the best ones"
    add("--autotune", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "write the values that autotune tries to FILE (CSV), and the best to the .json file next to it"
    add("--autotune-log-file", default="", metavar="FILE", help=text)
    text = "use the result of an earlier --autotune if it is for the same model and hardware"
    add("--tuned", default="", metavar="FILE", help=text)
    text = "start each output line with [rank] (default)"
    add("--prefix", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--timestamps", action="store_true", help="start each output line with the time")
    add("--output-json", action="store_true", help="print lines as JSON with rank, host, stream, time, text")
    text = "seconds within which all ranks must start (default: 60)"
    add("--start-timeout", type=number, default=60.0, metavar="S", help=text)
    text = "seconds for ranks to exit after Ctrl-C, SIGTERM or SIGHUP (default: 30). Ctrl-C again kills them"
    add("--grace", type=float, default=30.0, metavar="S", help=text)
    add("--detach", action="store_true", help="run in the background, detached from this terminal")
    add("--dry-run", action="store_true", help="print the plan without starting any ranks")
    add("--verbose", action="store_true", help="show each step and all of mpiexec's messages")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    return made


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts")
    add_host_options(group, "hosts, and the number of slots on each (default: 1)")
    add = group.add_argument
    text = "variables of this shell to forward to other hosts: all, except those specific to a machine or "
    text += "login (default), or none, except settings. -x NAME adds a variable"
    add("--env", choices=("all", "none"), default="all", help=text)
    text = "working directory of the ranks. It is used on this host only if it exists here"
    add("--chdir", default="", metavar="DIR", help=text)
    text = "network interfaces to use (default: the interfaces that connect all hosts)"
    add("--network-interface", action="append", default=[], metavar="A,B", help=text)
    text = "seconds without a heartbeat after which a host is considered lost (default: 30)"
    add("--host-timeout", type=number, default=30.0, metavar="S", help=text)
    text = "do not check the hosts before the start; with --dry-run, do not connect to them either"
    add("--no-check", action="store_true", help=text)


def main(argv: Sequence[str], check: Check | None = None) -> int:
    """Run ``ringdance run`` and return its exit code.

    Args:
        argv: Command-line arguments after ``run``.
        check: Checks the hosts before the job starts. Called only if there are several hosts.
    """

    def action() -> int:
        arguments = parser().parse_args(list(argv))
        return run(spec_of(arguments), arguments, _log, check)

    return as_program("ringdance run", action)


def run(
    spec: JobSpec, arguments: argparse.Namespace, log: Log, check: Check | None = None, show_map: bool = False
) -> int:
    """Run a job according to the options of ``ringdance run``, and return the exit code.

    Args:
        spec: The job.
        arguments: Options parsed by ``parser()``.
        log: Called with each line to show to the user.
        check: Checks the hosts before the job starts. Called only if there are several hosts.
        show_map: If True, show on which host each rank will run.
    """

    def checked(prepared: PreparedJob, log: Log) -> None:
        if check and prepared.plan.multi_host and not arguments.no_check:
            check(prepared, log)

    if arguments.detach and not arguments.dry_run:
        # No colors: a detached job writes to its log, not to this terminal.
        return start_detached(replace(spec, style=replace(spec.style, colour=0)), checked, log)
    prepared = prepare(spec, log)
    if arguments.dry_run:
        prepared.close()
        print(prepared.plan.describe(os.environ))
        return 0
    if show_map:  # omit the values of variables, which do not belong in a log
        print(prepared.plan.describe().partition("\nenvironment:")[0], file=sys.stderr)
    checked(prepared, log)
    return run_in_terminal(prepared)


def _log(text: str) -> None:
    print(f"ringdance run: {text}", file=sys.stderr, flush=True)


def _style(arguments: argparse.Namespace) -> Style:
    if arguments.output_json:
        return Style(json=True)
    if not arguments.prefix:
        return Style("", clock=arguments.timestamps)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return Style(clock=arguments.timestamps, colour=int(colour))


def _exports_of_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the settings given by options, as environment variables."""
    if arguments.autotune_log_file and not arguments.autotune:
        raise LaunchError("--autotune-log-file has no effect without --autotune. Add --autotune.")
    if arguments.autotune_log_file.endswith(".json"):
        raise LaunchError(
            "--autotune-log-file must be a CSV file. Pass tune.csv to have the result written to tune.json."
        )
    if arguments.tuned and not os.path.isfile(arguments.tuned):
        raise LaunchError(f"--tuned {arguments.tuned} is not an existing regular file. To create tune.json, "
                          "use `ringdance run --autotune --autotune-log-file tune.csv ...`")  # fmt: skip
    log, tuned = (path and os.path.abspath(path) for path in (arguments.autotune_log_file, arguments.tuned))
    settings = {
        "RINGDANCE_AUTOTUNE": "" if arguments.autotune is None else str(int(arguments.autotune)),
        "RINGDANCE_AUTOTUNE_LOG": log,
        "RINGDANCE_TUNED": tuned,
    }
    return {name: value for name, value in settings.items() if value}


def refuse_within_a_rank() -> None:
    """Raise LaunchError in a rank of a larger job, because every rank would start a separate job."""
    rank, size = (os.environ.get(f"RINGDANCE_{name}", "") for name in ("RANK", "SIZE"))
    if "RINGDANCE_JOB" in os.environ and size not in ("", "1"):
        raise LaunchError(
            f"this is rank {rank} of {size}, and every rank would start its own job. Remove the inner "
            "launcher. To start another job from a single rank, use `env -u RINGDANCE_SIZE ringdance run ...`"
        )


def spec_of(arguments: argparse.Namespace) -> JobSpec:
    """Build the job that the options of ``ringdance run`` describe.

    Raises:
        LaunchError: The value of an option is invalid, or the command cannot be run.
    """
    refuse_within_a_rank()
    refuse_launcher(arguments.command)
    exports = parse_exports(arguments.x, os.environ)
    return JobSpec(
        resolve_command(arguments.command, arguments.chdir),
        ranks=arguments.num_proc,
        hosts=hosts_of(arguments),
        source=f"--hostfile {arguments.hostfile}" if arguments.hostfile else "",
        shell=remote_shell_of(arguments),
        chdir=arguments.chdir,
        interfaces=[name for text in arguments.network_interface for name in text.split(",") if name],
        check=not (arguments.dry_run and arguments.no_check),
        exports=_exports_of_options(arguments) | exports,
        forward=arguments.env == "all",
        style=_style(arguments),
        timeline=arguments.timeline,
        output_directory=arguments.output_filename or "",
        start_timeout=arguments.start_timeout,
        heartbeat_timeout=arguments.host_timeout,
        grace=arguments.grace,
        verbose=arguments.verbose,
    )
