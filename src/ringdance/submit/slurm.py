"""``ringdance slurm script``: a batch file for sbatch that runs a command on its allocation."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser
from ringdance.launch.spec import as_program

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLES = """\
examples:
  ringdance slurm script --nodes 4 --gpus 8 --time 12:00:00 -- python train.py --epochs 90 > job.sh
  sbatch job.sh
"""


@dataclass(frozen=True)
class BatchJob:
    """What a batch file asks for.

    Attributes:
        command: what each rank runs.
        nodes: machines.
        ranks: on each.
        cpus: cores for each rank; None leaves it to Slurm.
        gpus: of each machine.
        time: limit, as Slurm writes it; "" for the partition's.
        name, partition, account, memory, output: as of sbatch; "" leaves them out.
        setup: shell lines before the start, such as ``module load cuda``.
        env: names of variables to export to the ranks.
        more: more options of sbatch.
    """

    command: Sequence[str]
    nodes: int = 1
    ranks: int = 1
    cpus: int | None = None
    gpus: int = 0
    time: str = ""
    name: str = "train"
    partition: str = ""
    account: str = ""
    memory: str = ""
    output: str = "%x-%j.log"
    setup: Sequence[str] = field(default_factory=tuple)
    env: Sequence[str] = field(default_factory=tuple)
    more: Sequence[str] = field(default_factory=tuple)

    def check(self) -> None:
        """Look for mistakes.

        Raises:
            LaunchError: what is wrong.
        """
        if not self.command:
            raise LaunchError("what is to be run? For example: -- python train.py")
        for option, number, least in (
            ("nodes", self.nodes, 1), ("ranks-per-node", self.ranks, 1), ("gpus", self.gpus, 0),
            ("cpus-per-rank", 1 if self.cpus is None else self.cpus, 1),
        ):  # fmt: skip
            if number < least:
                raise LaunchError(f"--{option} {number}: it must be {least} or more")
        if self.time and not _TIME.fullmatch(self.time):
            raise LaunchError(f"--time {self.time}: write minutes, H:MM:SS or D-HH:MM:SS")
        # A line of the file is one option: a line's end in a value would begin a line of its own.
        for text in (self.name, self.partition, self.account, self.memory, self.output, *self.more):
            if any(sign in text for sign in "\n\r\0"):
                raise LaunchError(f"{text!r}: it holds the end of a line")
        for name in self.env:
            if not _NAME.fullmatch(name):
                raise LaunchError(
                    f"-x {name}: give the name of a variable; its value is taken when the job starts"
                )

    def text(self) -> str:
        """The batch file.

        Raises:
            LaunchError: the job cannot be asked for.
        """
        self.check()
        options = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks}",
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []),
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *(
                f"--{option}={value}"
                for option, value in (
                    ("time", self.time), ("partition", self.partition), ("account", self.account),
                    ("mem", self.memory), ("output", self.output),
                )
                if value
            ),
            *self.more,
        ]  # fmt: skip
        exports = [word for name in self.env for word in ("-x", name)]
        run = ["ringdance", "run", "-np", str(self.nodes * self.ranks), *exports, "--", *self.command]
        lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in options), "set -e", *self.setup]
        # The launcher takes hosts and slots from the allocation; exec, so that signals of scancel reach it.
        return "\n".join([*lines, f"exec {shlex.join(run)}", ""])


def _quoted(option: str) -> str:
    """As a line of ``#SBATCH`` needs it, where quotation marks hold spaces together."""
    return f'"{option}"' if any(sign.isspace() for sign in option) else option


def main(argv: Sequence[str]) -> int:
    """``ringdance slurm``: `argv` without the program and ``slurm``; returns the exit code."""
    return as_program("ringdance slurm", lambda: _main(_parser().parse_args(list(argv))))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ringdance slurm", description="Training on a Slurm cluster.")
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    script = commands.add_parser(
        "script",
        help="write a batch file for sbatch",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = script.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="machines (default 1)")
    add("--ranks-per-node", type=int, metavar="N", help="default: the GPUs of a machine, else 1")
    add("--cpus-per-rank", type=int, metavar="N", help="cores for each rank")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each machine")
    add("--time", default="", help="limit: minutes, H:MM:SS or D-HH:MM:SS")
    add("--name", default="train", help="of the job (default: train)")
    add("--partition", default="", help="default: the cluster's")
    add("--account", default="", help="default: yours")
    add("--memory", default="", metavar="SIZE", help="of each machine, such as 64G")
    add("--output", default="%x-%j.log", metavar="FILE", help="the job's output (default: NAME-NUMBER.log)")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line before the start")
    add("-x", "--env", action="append", default=[], metavar="NAME", help="variable for the ranks")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option, as --sbatch=--exclusive",
    )
    add("command", nargs="*", metavar="COMMAND", help="behind --: what each rank runs")
    return parser


def _main(arguments: argparse.Namespace) -> int:
    job = BatchJob(
        command=arguments.command,
        nodes=arguments.nodes,
        ranks=arguments.ranks_per_node if arguments.ranks_per_node is not None else max(arguments.gpus, 1),
        cpus=arguments.cpus_per_rank,
        gpus=arguments.gpus,
        time=arguments.time,
        name=arguments.name,
        partition=arguments.partition,
        account=arguments.account,
        memory=arguments.memory,
        output=arguments.output,
        setup=arguments.setup,
        env=arguments.env,
        more=arguments.sbatch,
    )
    print(job.text(), end="")
    return 0
