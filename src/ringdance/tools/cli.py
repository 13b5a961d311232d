"""The ``ringdance`` command and its subcommands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ringdance import __version__
from ringdance.launch.parser import Parser, as_program

if TYPE_CHECKING:
    from ringdance.launch.prepare import PreparedJob

_EXAMPLES = """\
examples:
  ringdance run -np 2 python train.py                train in two processes on this machine
  ringdance run --help                               all options of run
  ringdance settings --changed                       settings that differ from their defaults
  RINGDANCE_CYCLE_TIME=2 ringdance settings          every setting with its value and origin
"""

_COMMANDS = {
    "train": {
        "run": ("ringdance.launch.cli", "start a training script on several processes"),
        "mpirun": ("ringdance.launch.mpirun_cli", "run command lines written for Open MPI 4's mpirun"),
        "status": ("ringdance.launch.background.commands:status", "show the jobs that run in the background"),
        "attach": ("ringdance.launch.background.commands:attach", "show a background job's output"),
        "stop": ("ringdance.launch.background.commands:stop", "end a background job"),
        "search": ("ringdance.tools.search.cli", "find a script's best hyperparameters in parallel trials"),
        "recipes": ("ringdance.tools.recipes", "list and copy training jobs that come with Ringdance"),
        "settings": ("ringdance.tools.cli:settings", "show the value, origin and meaning of all settings"),
    },
    "diagnose": {
        "doctor": ("ringdance.tools.doctor.cli", "find what makes training fail or hang on these machines"),
        "explain": ("ringdance.tools.explain", "find the rank that is holding up a job"),
        "timeline": ("ringdance.tools.report.timeline", "show where a step spends its time"),
        "report": ("ringdance.tools.report.cli", "write a page that shows what limits a run"),
        "bench": ("ringdance.tools.bench.cli", "measure what limits training, and how it scales"),
    },
    "tune and predict": {
        "plan": ("ringdance.tools.plan.cli", "predict speed, duration and cost on other machines"),
        "tune": ("ringdance.tools.tune", "find the best number of threads and ranks per host on CPUs"),
    },
    "data and hosts": {
        "data": ("ringdance.tools.data", "prepare images for training; check and describe data sets"),
        "hosts": ("ringdance.tools.hosts.cli", "copy files to hosts"),
    },
    "submit": {
        "k8s": ("ringdance.submit.kubernetes.cli", "write Kubernetes manifests for jobs"),
        "sagemaker": ("ringdance.submit.sagemaker.cli", "start training jobs on Amazon SageMaker"),
    },
}
"""Commands by group, each with a module and a help text. The named function (default: ``main``) runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``ringdance`` command and return the exit code. ``argv`` defaults to ``sys.argv[1:]``."""
    open_standard_streams()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # interrupted while importing modules
        return 130


def _main(words: Sequence[str]) -> int:
    # Each subcommand parses its own arguments.
    known = {name: module for group in _COMMANDS.values() for name, (module, _) in group.items()}
    if not words or words[0] not in known:
        parser = _parser(known)
        parser.parse_args(words)
        parser.print_help()
        return 2
    module, _, function = known[words[0]].partition(":")
    command = getattr(importlib.import_module(module), function or "main")
    return int(command(words[1:], _look) if words[0] in ("run", "mpirun") else command(words[1:]))


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams (`>&-`), so that no other file gets their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # open() returns the lowest free descriptor, which is the closed one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None and descriptor:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115


def _look(ready: PreparedJob, say: Callable[[str], None]) -> None:
    """Check the hosts of a job. The checks are imported here because only jobs on several hosts need them."""
    from ringdance.tools.doctor.preflight import check_hosts

    check_hosts(ready, say)


def _parser(known: Iterable[str]) -> argparse.ArgumentParser:
    groups = [
        f"{title}:\n" + "\n".join(f"  {name:10} {text}" for name, (_, text) in group.items())
        for title, group in _COMMANDS.items()
    ]
    parser = Parser(
        prog="ringdance", description="\n\n".join(["Data-parallel training over many processes.", *groups]),
        epilog=_EXAMPLES, usage="ringdance [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"ringdance {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=known, nargs="?", help=argparse.SUPPRESS)
    return parser


def settings(argv: Sequence[str]) -> int:
    """Run ``ringdance settings`` with the arguments ``argv``. Return the exit code."""
    parser = Parser(
        prog="ringdance settings",
        description="Show every setting as a script started from this shell would see it.",
    )
    parser.add_argument("--changed", action="store_true", help="only settings that differ from the default")
    return as_program("ringdance settings", lambda: _settings(parser.parse_args(list(argv)).changed))


def _settings(changed: bool) -> int:
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
    for k in chosen:
        origin = settings.origin(k.name)
        print(f"{k.name} = {show(k, getattr(settings, k.name))}   [{origin}]")
        if origin != "default":
            print(f"    default: {show(k, k.default)}")
        print(textwrap.fill(k.doc, 100, initial_indent="    ", subsequent_indent="    "))
        print("    " + ", ".join(name for name in (k.own, k.legacy) if name))
    if changed and not chosen:
        print("All settings have their default values.")
    sys.stdout.flush()
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return 0
