"""The command line of ``ringdance hosts``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing

from ringdance import subcommands
from ringdance.hosts import commands
from ringdance.hosts.host_set import HostSet, add_arguments, host_set
from ringdance.subcommands import Subcommand

_DESCRIPTION = "Look at hosts, copy files to them."
_EPILOG = """\
examples:
  ringdance hosts list -H node1:4,node2:4        show reachability and running jobs
  ringdance hosts copy -H node1,node2,node3 data /scratch/data

Without -H and --hostfile the hosts are those allocated by a scheduler: a Slurm or LSF job's, the workers of
an MPIJob or TrainJob, the hosts of a SageMaker job. `ringdance hosts COMMAND --help` shows all options.
The hosts need what `ringdance run` needs: ssh without a password, and this Python environment at the same
path.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance hosts`` with the words after it; returns the exit code."""
    return subcommands.run("ringdance hosts", _DESCRIPTION, _SUBCOMMANDS, argv, _EPILOG)


def _subcommand(
    action: Callable[[argparse.Namespace, HostSet], int],
    help: str,
    add_own: Callable[[argparse.ArgumentParser], None],
    epilog: str = "",
) -> Subcommand:
    """Make a subcommand of an action on hosts, with the options that name them."""

    def run(arguments: argparse.Namespace) -> int:
        with closing(host_set(arguments)) as hosts:
            return action(arguments, hosts)

    def add(parser: argparse.ArgumentParser) -> None:
        add_own(parser)
        add_arguments(parser)

    return Subcommand(run, help, add, epilog)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_copy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="a file or a directory on this machine")
    text = (
        "its path on the hosts, or with a / at the end the directory into which it goes "
        "(default: the same path as here)"
    )
    add("destination", metavar="DST", nargs="?", help=text)
    text = "compare contents; otherwise files of equal size and time are equal"
    add("--checksum", action="store_true", help=text)
    add("--direct", action="store_true", help="send to each host from here by ssh, nothing from host to host")
    _add_json(parser)


_LIST = "exit code: 0 if all hosts answer, else 1"
_COPY = """\
examples:
  ringdance hosts copy -H node1,node2,node3 data /scratch/data   the directory becomes /scratch/data
  ringdance hosts copy -H node1,node2 train.py /scratch/         into a directory, by its own name
  ringdance hosts copy --hostfile hosts train.py                 to the same path as here

Each file is written under another name, checked (SHA-256) and then renamed: it is complete or absent.
An interrupted copy is resumed by the same command. Nothing is removed on the hosts. This machine sends once,
by ssh. From host to host the bytes go over TCP, not encrypted, like MPI's; --direct avoids that.

exit code: 0 if everything is on all hosts, else 1"""
_SUBCOMMANDS = {
    "list": _subcommand(
        commands.list_hosts, "show hosts, whether they answer, and your ranks there", _add_json, _LIST
    ),
    "copy": _subcommand(
        commands.copy, "copy a file or a directory to all hosts, each passing it on", _add_copy, _COPY
    ),
}
