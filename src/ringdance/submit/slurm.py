"""``ringdance slurm script``: write a batch file for sbatch that runs a command on its allocation."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ringdance import subcommands
from ringdance.errors import LaunchError
from ringdance.submit.options import add_options, check_options, from_arguments, launch_line, option

_EXAMPLES = """\
examples:
  ringdance slurm script --nodes 4 --gpus 8 --time 12:00:00 -- python train.py --epochs 90 > job.sh
  sbatch job.sh
"""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A batch file's contents; see Note [Options from fields]."""

    nodes: int = option("machines", 1, minimum=1)
    ranks_per_node: int | None = option("default: the GPUs of a machine, else 1", type=int, minimum=1)
    cpus_per_rank: int | None = option("cores for each rank", type=int, minimum=1)
    gpus: int = option("GPUs of each machine", 0, minimum=0)
    time: str = option(
        "limit: minutes, H:MM:SS or D-HH:MM:SS", "",
        pattern=r"(\d+-)?\d+(:\d\d){0,2}", form="write minutes, H:MM:SS or D-HH:MM:SS",
    )  # fmt: skip
    name: str = option("of the job", "train")
    partition: str = option("default: the cluster's", "")
    account: str = option("default: yours", "")
    memory: str = option("of each machine, such as 64G", "", metavar="SIZE")
    output: str = option("the job's output", "%x-%j.log", metavar="FILE")
    setup: Sequence[str] = option("shell line before the start", list, metavar="LINE")
    env: Sequence[str] = option("variable for the ranks", list, "-x", "--env", metavar="NAME")
    sbatch: Sequence[str] = option("another option, as --sbatch=--exclusive", list, metavar="OPTION")
    command: Sequence[str] = option("after --: what each rank runs", (), "COMMAND", nargs="*")

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * (self.ranks_per_node or max(self.gpus, 1))

    def _check(self) -> None:
        check_options(self)
        if not self.command:
            raise LaunchError("missing COMMAND, for example: -- python train.py")
        # Each line of the file is one option: a newline in a value would begin another one.
        for text in (self.name, self.partition, self.account, self.memory, self.output, *self.sbatch):
            if any(sign in text for sign in "\n\r\0"):
                raise LaunchError(f"{text!r}: contains a newline")
        for name in self.env:
            if not name.isidentifier() or not name.isascii():
                raise LaunchError(f"-x {name}: give a variable's name; its value is read when the job starts")

    def text(self) -> str:
        """Write the batch file.

        Raises:
            LaunchError: a value cannot be used.
        """
        self._check()
        options = {
            "job-name": self.name, "nodes": self.nodes, "ntasks-per-node": self.ranks // self.nodes,
            "cpus-per-task": self.cpus_per_rank, "gpus-per-node": self.gpus, "time": self.time,
            "partition": self.partition, "account": self.account, "mem": self.memory, "output": self.output,
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items() if value]
        words += [word if word.startswith("-") else f"--{word}" for word in self.sbatch]
        lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(word)}" for word in words), "set -e", *self.setup]
        # The launcher takes hosts and slots from the allocation; exec, so that signals of scancel reach it.
        return "\n".join([*lines, f"exec {shlex.join(launch_line(self.ranks, self.env, self.command))}", ""])


def _quoted(word: str) -> str:
    """Quote a word for sbatch, which knows quotation marks and backslashes, and ends a line at a #."""
    escaped = re.sub(r'(["\\])', r"\\\1", word)
    return word if re.fullmatch(r"[\w./:=,%@+-]*", word) else f'"{escaped}"'


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance slurm`` with the words after it; returns the exit code."""
    script = subcommands.Subcommand(
        _script, "write a batch file for sbatch", lambda parser: add_options(parser, BatchJob), _EXAMPLES
    )
    return subcommands.run("ringdance slurm", "Training on a Slurm cluster.", {"script": script}, argv)


def _script(arguments: argparse.Namespace) -> int:
    print(from_arguments(BatchJob, arguments).text(), end="")
    return 0
