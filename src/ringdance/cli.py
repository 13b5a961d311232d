"""The command ``ringdance``: a subcommand for each thing that a person does from a shell."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringdance import __version__
from ringdance.launch.parser import Parser

if TYPE_CHECKING:
    from ringdance.launch.prepare import PreparedJob

_EXAMPLES = """\
examples:
  ringdance run -np 2 python train.py --epochs 3     train on two processes of this machine
  ringdance run --help                               all options of run
  ringdance settings --changed                       what the environment sets, and where
  RINGDANCE_CYCLE_TIME=2 ringdance settings          every setting with its value, origin and unit
"""

_PASSED_ON = {
    "doctor": ("ringdance.doctor.cli", "find what makes training fail, hang or crawl on these machines"),
    "status": ("ringdance.launch.background.commands:status", "show the jobs that run in the background"),
    "attach": ("ringdance.launch.background.commands:attach", "show the output of a job in the background"),
    "stop": ("ringdance.launch.background.commands:stop", "end a job in the background"),
    "explain": ("ringdance.explain", "name the rank that holds up a job, or why it failed"),
    "timeline": ("ringdance.observe.timeline", "show where the time of a step goes, by a timeline's file"),
    "report": ("ringdance.observe.report", "write a page about runs: what limits them, and what to try next"),
    "bench": ("ringdance.observe.bench", "measure whether the loader or the step limits a training"),
    "data": ("ringdance.data.prepare.cli", "prepare images for training, check and describe data sets"),
    "hosts": ("ringdance.hosts.cli", "look at hosts, run commands on them, copy files to them"),
    "k8s": ("ringdance.submit.kubernetes.cli", "write, submit and follow jobs on Kubernetes"),
    "sagemaker": ("ringdance.submit.sagemaker.cli", "start training jobs on Amazon SageMaker"),
    "slurm": ("ringdance.submit.slurm", "write batch files for Slurm"),
    "ec2": ("ringdance.submit.ec2", "write host files of EC2 instances"),
    "recipes": ("ringdance.recipes.cli", "list and copy training jobs that come with Ringdance"),
}
"""Commands with command lines of their own: the module with their ``main`` or what is named, and the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "run":
        # Everything after `run` is the launcher's and the script's: not looked at here.
        from ringdance.launch import cli as launch

        return launch.main(words[1:], _look)
    if words and words[0] == "mpirun":
        from ringdance.launch import mpirun_cli

        return mpirun_cli.main(words[1:], _look)
    if words and words[0] in _PASSED_ON:
        name, _, function = _PASSED_ON[words[0]][0].partition(":")
        return int(getattr(importlib.import_module(name), function or "main")(words[1:]))
    arguments = _parser().parse_args(words)
    if arguments.command == "settings":
        try:
            return _settings(arguments.changed, arguments.format)
        except BrokenPipeError:  # `ringdance settings | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    _parser().print_help()
    return 2


def open_standard_streams() -> None:
    """Open on /dev/null those that the caller has closed (`>&-`): other files would get their numbers."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free, which is it
        if getattr(sys, name) is None and descriptor:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115


def _look(ready: PreparedJob, say: Callable[[str], None]) -> None:
    """What is wrong with the hosts of a job; only jobs over several hosts pay for the import."""
    from ringdance.doctor.preflight import check_hosts

    check_hosts(ready, say)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ringdance",
        description="Data-parallel training over many processes.",
        epilog=_EXAMPLES,
        allow_abbrev=True,
    )
    parser.add_argument("--version", action="version", version=f"ringdance {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    commands.add_parser("run", help="start a training script on several processes", add_help=False)
    commands.add_parser("mpirun", help="the same for command lines of Open MPI 4's mpirun", add_help=False)
    for name, (_, text) in _PASSED_ON.items():
        commands.add_parser(name, help=text, add_help=False)
    settings = commands.add_parser(
        "settings",
        help="show every setting: value, origin, unit, meaning, names in the environment",
        description="Show every setting as a script started from this shell would see it.",
        allow_abbrev=True,
    )
    settings.add_argument("--changed", action="store_true", help="only those that differ from the default")
    settings.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    return parser


def _settings(changed: bool, style: str) -> int:
    from ringdance.errors import SettingError
    from ringdance.settings import SETTINGS, SettingWarning, load, show

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingWarning)
        try:
            settings = load()
        except SettingError as error:
            print(f"ringdance: {error}", file=sys.stderr)
            return 2
    chosen = [k for k in SETTINGS if not changed or getattr(settings, k.name) != k.default]
    if style == "json":
        fields = ("name", "default", "unit", "doc", "no_effect")
        rows = [
            {field: getattr(k, field) for field in fields}
            | {"value": getattr(settings, k.name), "origin": settings.origin(k.name)}
            | {"environment": [name for name in (k.own, k.legacy) if name]}
            for k in chosen
        ]
        print(json.dumps(rows, indent=2))
    else:
        for k in chosen:
            origin = settings.origin(k.name)
            print(f"{k.name} = {show(k, getattr(settings, k.name))}   [{origin}]")
            if origin != "default":
                print(f"    default: {show(k, k.default)}")
            note = f" No effect: {k.no_effect}." if k.no_effect else ""
            print(textwrap.fill(k.doc + note, 100, initial_indent="    ", subsequent_indent="    "))
            print("    " + ", ".join(name for name in (k.own, k.legacy) if name))
        if changed and not chosen:
            print("All settings have their default values.")
    sys.stdout.flush()
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return 0
