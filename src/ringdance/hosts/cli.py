"""The command ``ringdance hosts``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringdance.hosts import deeds
from ringdance.hosts.members import Members, add_arguments, members_of
from ringdance.launch.parser import Parser
from ringdance.launch.spec import as_program

_EPILOG = """\
examples:
  ringdance hosts list -H node1:4,node2:4        do they answer, and what of ours runs there?
  ringdance hosts run --hostfile hosts -- nvidia-smi -L
  ringdance hosts copy -H node1,node2,node3 data /scratch/data
  ringdance hosts disk -H node1,node2 /scratch
  ringdance hosts kill -H node1,node2 3f2a91c0   end a job's processes, whatever has become of its launcher
  ringdance hosts trust -H node1,node2           learn their ssh keys

Without -H and --hostfile the hosts are those that a scheduler has given: a Slurm or LSF job's, the workers of
an MPIJob or TrainJob, the hosts of a SageMaker job. `ringdance hosts COMMAND --help` tells more of each.
They need what `ringdance run` needs: ssh without a password, and this Python environment at the same place.
"""


class Command(NamedTuple):
    """One of the commands: what does it, its help, and its own arguments."""

    do: Callable[[argparse.Namespace, Members], int]
    help: str
    more: str
    add: Callable[[argparse.ArgumentParser], None]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="ringdance hosts",
        description="Look at hosts, run commands on them, copy files to them, end what was started there.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, known in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=known.help,
            description=f"{known.help[0].upper()}{known.help[1:]}.",
            epilog=known.more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        known.add(one)
        add_arguments(one)
    return made


def main(argv: Sequence[str]) -> int:
    """``ringdance hosts``: `argv` without the program and ``hosts``; returns the exit code."""

    def action() -> int:
        arguments = parser().parse_args(list(argv))
        members = members_of(arguments)
        try:
            return COMMANDS[arguments.command].do(arguments, members)
        finally:
            members.close()

    return as_program("ringdance hosts", action)


def _format(one: argparse.ArgumentParser) -> None:
    one.add_argument("--format", choices=("table", "json"), default="table", help="default: table")


def _run(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("--folder", default="", metavar="DIR", help="where the command begins (default: the home folder)")
    add("--timeout", type=float, metavar="S", help="end the command after so many seconds (default: never)")
    add("--live", action="store_true", help="show each line at once, as `<host> text`")
    _format(one)
    add("words", nargs=argparse.REMAINDER, metavar="-- CMD", help="the command and its arguments")


def _copy(one: argparse.ArgumentParser) -> None:
    add = one.add_argument
    add("source", metavar="SRC", help="a file or a folder here")
    add(
        "destination",
        metavar="DST",
        nargs="?",
        help="what it becomes on the hosts, or with a / at the end the folder into which it goes "
        "(default: the same path as here)",
    )
    add(
        "--checksum",
        action="store_true",
        help="compare contents; else files of equal size and time are equal",
    )
    add("--direct", action="store_true", help="send to each host from here by ssh, nothing from host to host")
    _format(one)


def _kill(one: argparse.ArgumentParser) -> None:
    one.add_argument("job", metavar="JOB", help="the job, or the first digits of its name")


def _disk(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "folders", metavar="DIR", nargs="*", help="folders (default: the current one, /tmp, /dev/shm)"
    )
    _format(one)


def _trust(one: argparse.ArgumentParser) -> None:
    one.add_argument("--yes", action="store_true", help="write new keys without asking")


COMMANDS = {
    "list": Command(
        deeds.list_,
        "hosts with their slots, whether they answer, and which ranks of ours run there",
        "examples:\n"
        "  ringdance hosts list -H node1:4,node2:4\n"
        "  ringdance hosts list --hostfile hosts --format json\n\n"
        "exit code: 0 if all hosts answer, else 1",
        _format,
    ),
    "run": Command(
        deeds.run,
        "run a command on every host at the same time, and show what they said, equal outputs once",
        "Several words are a program and its arguments; a single word is a line for the shell there:\n"
        "  ringdance hosts run -H node1,node2 -- nvidia-smi -L\n"
        "  ringdance hosts run -H node1,node2 -- 'dmesg | tail -3'\n"
        "  ringdance hosts run -H node1,node2 --folder /scratch --timeout 60 -- du -sh data\n\n"
        "Programs of this Python environment are found first, so `pip` is this one's. It reads nothing.\n"
        "Ctrl-C ends it on all hosts.\n\n"
        "exit code: 0 if it was 0 on all hosts; else that of the hosts where it was not, if it is the same,\n"
        "or 1; 124 for --timeout, 255 for a host that could not be reached",
        _run,
    ),
    "copy": Command(
        deeds.copy,
        "copy a file or a folder to all hosts, which pass it on to one another",
        "examples:\n"
        "  ringdance hosts copy -H node1,node2,node3 data /scratch/data   the folder becomes /scratch/data\n"
        "  ringdance hosts copy -H node1,node2 train.py /scratch/         into a folder, by its own name\n"
        "  ringdance hosts copy --hostfile hosts train.py                 to the same place as here\n\n"
        "Every file is written under another name, checked (SHA-256) and then renamed: it is there as a\n"
        "whole or not at all. Interrupted and started again, it goes on where it was. Nothing is removed on\n"
        "the hosts. This machine sends once, by ssh. From host to host the bytes go over TCP as they are,\n"
        "like MPI's; --direct avoids that.\n\n"
        "exit code: 0 if all is there on all hosts, else 1",
        _copy,
    ),
    "kill": Command(
        deeds.kill,
        "end all processes of a job on these hosts, and nothing else",
        "examples:\n"
        "  ringdance hosts kill -H node1,node2 3f2a91c0\n\n"
        "The hard way, for what its launcher cannot end any more; orderly: Ctrl-C, or `ringdance stop`.\n"
        "Only processes that `ringdance run` has started, with their files in /tmp and /dev/shm.",
        _kill,
    ),
    "disk": Command(
        deeds.disk,
        "size and free room of folders on all hosts",
        "examples:\n"
        "  ringdance hosts disk -H node1,node2\n"
        "  ringdance hosts disk -H node1,node2 /scratch /dev/shm --format json",
        _disk,
    ),
    "trust": Command(
        deeds.learn,
        "learn the ssh keys of all hosts, after showing them",
        "examples:\n"
        "  ringdance hosts trust -H node1,node2          shows the fingerprints and asks\n"
        "  ringdance hosts trust --hostfile hosts --yes\n\n"
        "Compare the fingerprints with those of the hosts (there: ssh-keygen -lf\n"
        "/etc/ssh/ssh_host_ed25519_key.pub): keys come over the network, and so may somebody else's. A key\n"
        "that differs from a known one is never written.\n\n"
        "exit code: 0 if all keys are known now, else 1",
        _trust,
    ),
}
