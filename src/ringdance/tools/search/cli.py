"""The command line of ``ringdance search``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ringdance.errors import LaunchError
from ringdance.host.limits import usable_cores
from ringdance.host.schedulers.detect import detect
from ringdance.host.schedulers.this_machine import local_names
from ringdance.launch import subcommands
from ringdance.launch.cli import refuse_within_a_rank
from ringdance.launch.parser import Parser, as_program, number, positive
from ringdance.launch.remote.shell import add_host_options, hosts_of, ssh_words
from ringdance.launch.spec import resolve_command
from ringdance.launch.subcommands import Subcommand
from ringdance.tools.search.searcher import Searcher, places
from ringdance.tools.search.space import check_command, read_space
from ringdance.tools.search.study import Study, headline, table

_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
_EXAMPLE = """
example:
  ringdance search space.yaml -- python train.py --lr {lr} --batch {batch}
with, in space.yaml:
  parameters: {lr: {low: 0.001, high: 1, log: true}, batch: [16, 32, 64]}
  objective: {name: accuracy, goal: maximize, line: 'accuracy: (\\S+)'}

exit code: 0 if a trial finished, 1 if none did or too many failed, 2 if nothing was started, 130 after Ctrl-C
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance search`` with the arguments ``argv``. Returns the exit code."""
    if argv and argv[0] in _SUBCOMMANDS:
        return subcommands.run("ringdance search", "Show the results of a study.", _SUBCOMMANDS, argv)
    return as_program("ringdance search", lambda: _search(_parser().parse_args(list(argv))))


def _parser() -> argparse.ArgumentParser:
    usage = "ringdance search SPACE.yaml [options] -- COMMAND [ARGUMENTS...]\n"
    usage += "       ringdance search show|best STUDY"
    text = "Find the best hyperparameters of a training script in parallel trials."
    commands = "\n".join(["commands:", *(f"  {name:<8}{one.help}" for name, one in _SUBCOMMANDS.items())])
    made = Parser(prog="ringdance search", usage=usage, description=text, epilog=f"{commands}\n{_EXAMPLE}")
    add = made.add_argument
    add("space", metavar="SPACE.yaml", type=Path, help="file with parameters, objective, sampler and pruner")
    add("--study", type=Path, metavar="DIR", help="directory for the results (default: SPACE.search)")
    text = "start each trial with `ringdance run` on N ranks (default: as a single process)"
    add("--ranks-per-trial", type=positive, metavar="N", help=text)
    text = "seconds for trials to exit after Ctrl-C or pruning (default: 30); a second Ctrl-C kills them"
    add("--grace", type=number, default=30.0, metavar="S", help=text)
    add("command", nargs="+", metavar="COMMAND", help="command of a trial; {lr} stands for parameter lr")
    add_host_options(made.add_argument_group("hosts"), "hosts and their slots (default: this host's cores)")
    return made


def _search(arguments: argparse.Namespace) -> int:
    refuse_within_a_rank()
    space, command = read_space(arguments.space), arguments.command
    check_command(space, command)
    resolve_command(command[:1])
    ranks, cores, allocation = arguments.ranks_per_trial, usable_cores(), detect(os.environ)
    here = [("localhost", max(cores, ranks or 1))]
    hosts = hosts_of(arguments) or (allocation.hosts if allocation and not allocation.refused else here)
    free, names = places(hosts, ranks or 1), {name for name, _ in hosts}
    direct = ranks is None and names == local_names(names)
    environ = {"OMP_NUM_THREADS": str(max(1, cores // max(count for _, count in hosts))), **os.environ}
    study = Study(arguments.study or arguments.space.with_suffix(".search"), space, command)
    console = Console(**_PLAIN)
    options = None if direct else ssh_words(arguments)
    searcher = Searcher(study, console, free, command, options, environ, arguments.grace)
    code = searcher.run()
    console.print(headline(study), soft_wrap=True)
    if study.best():
        print(_best(study))
    return code


# --- subcommands -----------------------------------------------------------------------------------


def _best(study: Study) -> str:
    """Return a shell command that repeats the best trial, with a new directory for its files."""
    if (best := study.best()) is None:
        raise LaunchError(f"{study.directory}: no trial has finished yet. Run the search first.")
    old, new = ((study.directory / name / f"{best.number:04}").resolve() for name in ("trials", "best"))
    words: list[str] = best.user_attrs["command"]
    if any(str(old) in word for word in words):
        new.mkdir(parents=True, exist_ok=True)
        (new / "params.json").write_text(json.dumps(best.params) + "\n")
    return shlex.join([word.replace(str(old), str(new)) for word in words])


def _study(arguments: argparse.Namespace) -> Study:
    path: Path = arguments.study
    return Study(path.with_suffix(".search") if path.is_file() else path)


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", type=Path, help="directory of the study, or its SPACE.yaml")


def _show(arguments: argparse.Namespace) -> int:
    study, console = _study(arguments), Console(**_PLAIN)
    console.print(table(study))
    for trial in study.trials("FAIL"):
        console.print(f"trial {trial.number} failed: {trial.user_attrs.get('reason')}", soft_wrap=True)
    return 0


def _print_best(arguments: argparse.Namespace) -> int:
    print(_best(_study(arguments)))
    return 0


_SUBCOMMANDS = {
    "show": Subcommand(_show, "list the trials of a study", _add_study),
    "best": Subcommand(_print_best, "print the command of the best trial, ready to run", _add_study),
}
