"""The command line of ``ringdance search``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ringdance import subcommands
from ringdance.cluster.detect import detect
from ringdance.errors import LaunchError, optional
from ringdance.launch.cli import refuse_within_a_rank
from ringdance.launch.hosts import facts_from, local_names
from ringdance.launch.parser import Parser, as_program, positive, seconds
from ringdance.launch.remote.shell import add_host_options, hosts_of
from ringdance.launch.spec import resolve_command
from ringdance.launch.system import machine
from ringdance.search.katib import experiment
from ringdance.search.searcher import Searcher, places
from ringdance.search.space import as_text, check_command, fill, read_space
from ringdance.search.study import Study, headline, table
from ringdance.subcommands import Subcommand
from ringdance.tune import plots

_EPILOG = """\
commands:
  show      list the trials of a study
  best      print the best command, ready to run
  plot      draw the trials, and the best value so far

examples:
  ringdance search space.yaml -- python train.py --lr {lr} --batch {batch}
  ringdance search space.yaml --ranks-per-trial 2 -H h1:4,h2:4 -- python train.py --lr {lr}
  ringdance search space.yaml --trials 100 -- python train.py {params}        go on with the study, to 100
  ringdance search best space.search       or show, or plot

The file has, for example,
  parameters: {lr: {low: 0.001, high: 1, log: true}, batch: [16, 32, 64]}
  objective: {name: accuracy, goal: maximize, line: 'accuracy: (\\S+)'}

exit code: 0 if a trial finished; 1 if none did or too many failed; 2 if nothing was started; 130 after Ctrl-C
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance search`` with the words after it; returns the exit code."""
    if argv and argv[0] in _SUBCOMMANDS:
        return subcommands.run("ringdance search", "Look at a study.", _SUBCOMMANDS, argv)
    return as_program("ringdance search", lambda: _search(_parser().parse_args(list(argv))))


def _parser() -> argparse.ArgumentParser:
    usage = "ringdance search SPACE.yaml [options] -- COMMAND [ARGUMENTS...]\n"
    usage += "       ringdance search show|best|plot STUDY"
    text = "Try parameters of a training script side by side, and find the best."
    made = Parser(prog="ringdance search", usage=usage, description=text, epilog=_EPILOG)
    add = made.add_argument
    add("space", metavar="SPACE.yaml", type=Path, help="parameters, objective, sampler and pruner")
    add("--study", type=Path, metavar="DIR", help="where all is kept (default: SPACE.search)")
    add("--trials", type=positive, metavar="N", help="in all, in place of those of the file")
    text = "start each trial by `ringdance run` with N ranks (default: one process, by itself)"
    add("--ranks-per-trial", type=positive, metavar="N", help=text)
    add("--gpus", action="store_true", help="slot k of a host is its GPU k: a trial sees only its own")
    text = "seconds for trials to end after Ctrl-C, or once pruned (default 30); Ctrl-C again ends them"
    add("--grace", type=seconds, default=30.0, metavar="S", help=text)
    add("--katib", action="store_true", help="print the search as a Katib Experiment, and start nothing")
    add("command", nargs="+", metavar="COMMAND", help="after --: a trial, with {lr} for the parameter lr")
    add_host_options(made.add_argument_group("hosts"), "hosts and their slots (default: the cores here)")
    return made


def _search(arguments: argparse.Namespace) -> int:
    refuse_within_a_rank()
    space, ranks, command = read_space(arguments.space), arguments.ranks_per_trial, arguments.command
    space = replace(space, trials=arguments.trials or space.trials)
    if arguments.katib:
        text = json.dumps(experiment(space, command))  # else what its parts share becomes an anchor
        print(optional("yaml", LaunchError).safe_dump(json.loads(text), sort_keys=False, width=110), end="")
        return 0
    check_command(space, command)
    resolve_command(command[:1])
    names = ("ssh_port", "ssh_identity_file", "python", "ssh_args")
    given = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
    options = [f"{name}={value}" for name, value in given.items() if value]
    where, console = _layout(arguments, options), Console(highlight=False, markup=False, emoji=False)
    study = Study(arguments.study or arguments.space.with_suffix(".search"), space)
    study.keep(command, ["ringdance", "run", "-np", str(ranks), *options] if ranks else [])
    code = Searcher(study, space, console, **where, grace=arguments.grace).run()
    console.print(headline(study), soft_wrap=True)
    if study.best():
        print(_best(study))
    return code


def _layout(arguments: argparse.Namespace, options: Sequence[str]) -> dict[str, Any]:
    """Return where trials run: on the hosts given, those of a scheduler, or this machine's cores."""
    found, here, ranks = detect(os.environ), facts_from(machine.facts()), arguments.ranks_per_trial
    slots = len(here.visible) if arguments.gpus else max(here.cores, ranks or 1)
    hosts = hosts_of(arguments) or (found.hosts if found and not found.refused else [("localhost", slots)])
    names, most = {name for name, _ in hosts}, max(count for _, count in hosts)
    local = names <= local_names(names)
    seen = here.visible_devices.split(",") if local and here.visible_devices else list(map(str, range(most)))
    gpus = len(here.visible) if local else most
    if arguments.gpus and not 0 < most <= gpus:
        raise LaunchError(f"--gpus: GPUs that trials can use here: {gpus}; slots (-H): {most}")
    free = places(hosts, ranks or 1)
    if arguments.gpus and any(len({host for host, _ in place}) > 1 for place in free):
        raise LaunchError("--gpus is for trials on one host each; those on whole hosts need no --gpus")
    return {
        "free": free,
        "launch": None if local and ranks is None else options,
        "exports": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, here.cores // most))},
        "devices": seen if arguments.gpus else [],
    }


# --- subcommands -----------------------------------------------------------------------------------


def _best(study: Study) -> str:
    """Return the command of the best trial, for a shell."""
    best, facts = study.best(), study.facts
    if best is None:
        raise LaunchError(f"{study.directory}: no trial has finished yet")
    named = {facts["parameters"][name]["env"]: as_text(value) for name, value in best.params.items()}
    env = [f"{name}={value}" for name, value in named.items() if name]
    command = fill(facts["command"], best.params, study.directory / "trials" / f"{best.number:04}")
    return shlex.join([*(["env", *env] if env else []), *facts["launch"], *command])


def _study(arguments: argparse.Namespace) -> Study:
    given: Path = arguments.study
    return Study(given.with_suffix(".search") if given.is_file() else given)


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", type=Path, help="its directory, or the SPACE.yaml of it")


def _add_plot(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    text = "SVG or PNG (default: history.svg in the study); one for dark pages is beside it"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)


def _show(arguments: argparse.Namespace) -> int:
    study, console = _study(arguments), Console(highlight=False, markup=False, emoji=False)
    console.print(table(study))
    for one in study.trials("FAIL"):
        console.print(f"trial {one.number} failed: {one.user_attrs.get('reason')}", soft_wrap=True)
    return 0


def _print_best(arguments: argparse.Namespace) -> int:
    print(_best(_study(arguments)))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    study = _study(arguments)
    aim, trials = study.facts["objective"], study.trials("COMPLETE")
    values = [one.value or 0.0 for one in trials]
    best = itertools.accumulate(values, max if aim["goal"] == "maximize" else min)
    ways = {"trial": values, "best so far": best}
    drawn = {name: [(one.number, y) for one, y in zip(trials, ys, strict=True)] for name, ys in ways.items()}
    panels = {f"{len(trials)} finished trials": drawn}
    target = arguments.output or study.directory / "history.svg"
    print(*plots.lines(target, panels, "trial", aim["name"], from_zero=False), sep="\n")
    return 0


_SUBCOMMANDS = {
    "show": Subcommand(_show, "list a study's trials", _add_study),
    "best": Subcommand(_print_best, "print the command of the best trial", _add_study),
    "plot": Subcommand(_plot, "draw the objective of all trials, and the best so far", _add_plot),
}
