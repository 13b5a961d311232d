"""The command line of ``horovodrun``: the options it accepts and how they are parsed."""

from __future__ import annotations

import argparse
import itertools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import horovod
from horovod.runner.common.util import config_parser
from ringdance.launch.parser import Parser, rank_count
from ringdance.settings import NO_EFFECT, SETTINGS

__all__ = ["DEFAULTS", "parse_args"]

_EPILOG = """\
examples:
  horovodrun -np 2 python train.py                          two processes on this machine
  horovodrun -np 4 -H localhost:4 python train.py --epochs 3
  horovodrun -np 8 -H node1:4,node2:4 python train.py       four on each of two hosts, over ssh
  horovodrun -np 2 --output-filename logs python train.py   logs/rank.0/stdout, ...
  horovodrun -np 2 --config-file settings.yaml python train.py
  horovodrun --check-build                                  what is available

Options before the command are for horovodrun. Everything after the command is passed to it.
The command line takes precedence over the configuration file, and both take precedence over
environment variables.

exit code: 0 if all processes exited with 0; otherwise the code of the first process to fail (128 + n
if signal n killed it); 2 if nothing was started; 127 if the command was not found; 130 after Ctrl-C.
"""

DEFAULTS: dict[str, Any] = {
    **{setting.dest: None for setting in config_parser.SETTINGS},
    **dict.fromkeys(
        ("num_proc", "min_num_proc", "max_num_proc", "slots", "elastic_timeout", "reset_limit", "config_file",
         "cooldown_range", "hosts", "hostfile", "host_discovery_script", "start_timeout", "output_filename",
         "ssh_port", "ssh_identity_file", "nics", "mpi_args", "binding_args", "executable"),
    ),
    **dict.fromkeys(
        ("check_build", "disable_cache", "verbose", "tcp_flag", "use_gloo", "use_mpi", "use_jsrun",
         "prefix_output_with_timestamp"),
        False,
    ),
    "command": [],
}  # fmt: skip
"""Default values of the parsed arguments' attributes."""

_NO_VALUE: dict[str, Any] = {"action": "store_true"}


class _Interfaces(argparse.Action):
    """Collects names of network interfaces in one set."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if option == "--network-interface" and "," in values:
            warnings.warn(
                "--network-interface with several names is deprecated: use --network-interfaces",
                DeprecationWarning,
                stacklevel=2,
            )
        names = {name.strip() for name in values.split(",")} - {""}
        namespace.nics = getattr(namespace, "nics", set()) | names


class _Deprecated(argparse.Action):
    """An older option with the same meaning. ``const`` holds the value and the option to use instead."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        value, instead = self.const
        warnings.warn(f"{option} is deprecated: use {instead}", DeprecationWarning, stacklevel=2)
        setattr(namespace, self.dest, value)


def _parser() -> argparse.ArgumentParser:
    # No defaults: the namespace holds only what was passed on the command line.
    parser = Parser(
        prog="horovodrun",
        usage="horovodrun -np N [options] COMMAND [ARGUMENTS...]",
        description="Run a command as N processes of one job, with Ringdance.",
        epilog=_EPILOG,
        allow_abbrev=True,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=horovod.__version__, help="print the version")
    add("-np", "--num-proc", type=int, metavar="N", help="number of processes (default: number of slots)")
    add("-n", type=rank_count, dest="num_proc", help=argparse.SUPPRESS)
    add("-cb", "--check-build", **_NO_VALUE, help="print what is available, and exit")
    add("--disable-cache", **_NO_VALUE, help="accepted but ignored: hosts are checked at every start")
    add(
        "--start-timeout",
        type=config_parser.number,
        metavar="S",
        help="seconds within which all processes must start (default: HOROVOD_START_TIMEOUT or 30)",
    )
    add("--network-interfaces", action=_Interfaces, metavar="A,B", dest="nics", help="NICs to use")
    add("--network-interface", action=_Interfaces, metavar="A", dest="nics", help="a NIC to use, repeatable")
    add("--output-filename", metavar="DIR", help="also write DIR/rank.<r>/stdout and stderr")
    add("--verbose", **_NO_VALUE, help="show what is being done")
    add("--config-file", metavar="FILE", help="YAML file with values for options that are not passed")
    add("-p", "--ssh-port", type=int, metavar="N", help="ssh port on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh to other hosts")
    _add_settings(parser)
    _add_output(parser)
    _add_elastic(parser)
    _add_hosts(parser)
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    docs = {setting.legacy: setting.doc for setting in SETTINGS}
    docs |= {f"HOROVOD_{name}": f"no effect: {reason}" for name, (_, reason) in NO_EFFECT.items()}
    group = parser.add_argument_group("settings of the processes (HOROVOD_* variables)")
    for setting in config_parser.SETTINGS:
        doc = docs[setting.variable].replace("%", "%%")
        if setting.dest in ("log_level", "log_with_timestamp"):
            continue
        if setting.dest == "no_stall_check":
            check = group.add_mutually_exclusive_group()
            check.add_argument("--no-stall-check", **_NO_VALUE, help=doc)
            check.add_argument(
                "--stall-check", action="store_false", dest="no_stall_check", help="check for stalls"
            )
        elif setting.kind is bool:
            group.add_argument(setting.option, action=argparse.BooleanOptionalAction, help=doc)
        else:
            letter = {str: "TEXT", int: "N"}.get(setting.kind, "X")  # type: ignore[call-overload]
            group.add_argument(setting.option, type=setting.kind, metavar=letter, help=doc)
    mpi = parser.add_argument_group("MPI")
    mpi.add_argument("--mpi-args", metavar="TEXT", help='more mpiexec options, as in --mpi-args="-x NAME"')
    mpi.add_argument("--binding-args", metavar="TEXT", help="mpiexec options that replace `--bind-to none`")
    mpi.add_argument("--tcp", **_NO_VALUE, dest="tcp_flag", help="TCP only: sets NCCL_IB_DISABLE=1")
    control = mpi.add_mutually_exclusive_group()
    control.add_argument("--gloo", **_NO_VALUE, dest="use_gloo", help="accepted, but MPI is used instead")
    control.add_argument(
        "--mpi", **_NO_VALUE, dest="use_mpi", help="accepted: MPI always connects the processes"
    )
    control.add_argument(
        "--jsrun", **_NO_VALUE, dest="use_jsrun", help="accepted, but mpiexec starts the processes"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    group.add_argument("--log-level", type=str.upper, choices=levels, help="lowest severity to show")
    stamps = group.add_mutually_exclusive_group()
    add = stamps.add_argument
    add("--log-with-timestamp", **_NO_VALUE, help="show the time in log messages (default)")
    add("--log-without-timestamp", action="store_false", dest="log_with_timestamp", help="omit the time")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        **_NO_VALUE,
        dest="prefix_output_with_timestamp",
        help="begin each output line with the time",
    )
    for option, value, instead in (
        ("--no-log-hide-timestamp", True, "--log-with-timestamp"),
        ("--log-hide-timestamp", False, "--log-without-timestamp"),
    ):
        add(
            option,
            action=_Deprecated,
            nargs=0,
            const=(value, instead),
            dest="log_with_timestamp",
            help=f"deprecated form of {instead}",
        )


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("elastic jobs").add_argument
    add(
        "--min-np",
        "--min-num-proc",
        type=int,
        metavar="N",
        dest="min_num_proc",
        help="minimum number of processes",
    )
    add("--max-np", "--max-num-proc", type=int, metavar="N", dest="max_num_proc", help="maximum processes")
    add("--slots-per-host", type=int, metavar="N", dest="slots", help="slots of hosts given without a number")
    add(
        "--elastic-timeout",
        type=config_parser.number,
        metavar="S",
        help="seconds to wait for slots after a change (default: HOROVOD_ELASTIC_TIMEOUT or 600)",
    )
    add("--reset-limit", type=int, metavar="N", help="maximum number of restarts")
    add(
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        dest="cooldown_range",
        help="seconds after which a failed host may rejoin",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts").add_mutually_exclusive_group()
    group.add_argument(
        "-H", "--hosts", metavar="H1:N,H2:M", help="hosts with slots, for example localhost:4"
    )
    group.add_argument("-hostfile", "--hostfile", metavar="FILE", help="file with lines `HOST slots=N`")
    group.add_argument(
        "--host-discovery-script", metavar="FILE", help="program that prints HOST or HOST:SLOTS"
    )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse ``argv`` (default: this process's arguments) and fill in the configuration file's values.

    Raises:
        ValueError: A value cannot be used. The message names the option or the file.
        SystemExit: argparse has printed an error, the help text or the version.
    """
    given = vars(_parser().parse_args(argv))
    args = argparse.Namespace(**{**DEFAULTS, **given})
    if args.config_file:
        config_parser.set_args_from_config(args, config_parser.read_config(args.config_file), set(given))
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Fill in values from the environment, then check all values. Raises ValueError if one cannot be used."""
    config_parser.validate_config_args(args)
    if args.start_timeout is None:
        args.start_timeout = _number("HOROVOD_START_TIMEOUT", 30)
    for dest in ("num_proc", "min_num_proc", "max_num_proc", "slots", "start_timeout", "elastic_timeout"):
        value = getattr(args, dest)
        if value is not None and not value > 0:
            raise ValueError(f"{dest}={value} must be > 0")
    sizes = [name for name in ("min_num_proc", "num_proc", "max_num_proc") if getattr(args, name) is not None]
    for low, high in itertools.pairwise(sizes):
        if getattr(args, low) > getattr(args, high):
            raise ValueError(f"{low}={getattr(args, low)} must be <= {high}={getattr(args, high)}")
    if args.reset_limit is not None and args.reset_limit < 0:
        raise ValueError(f"reset_limit={args.reset_limit} must be >= 0")
    if args.ssh_port is not None and not 0 < args.ssh_port < 65536:
        raise ValueError(f"ssh_port={args.ssh_port} must be a port, 1 to 65535")
    if args.cooldown_range is not None:
        least, most = args.cooldown_range
        if not 1 <= least <= most <= 3600:
            raise ValueError(f"cooldown_range={least} {most} must be 1 <= MIN <= MAX <= 3600 seconds")
    if args.ssh_identity_file and not os.path.isfile(args.ssh_identity_file):
        raise ValueError(f"ssh_identity_file={args.ssh_identity_file} must be a file")


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        return config_parser.number(text) if text else default
    except ValueError:
        raise ValueError(f"{variable}={text} must be a number of seconds") from None
