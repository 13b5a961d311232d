"""Commands that have subcommands, such as ``ringdance hosts``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ringdance.launch.parser import Parser, as_program


class Subcommand(NamedTuple):
    """One subcommand.

    Attributes:
        run: Function that runs the subcommand and returns the exit code.
        help: One-line description.
        add_arguments: Function that adds the subcommand's arguments to a parser.
        epilog: Text at the end of the subcommand's help, such as examples.
    """

    run: Callable[[argparse.Namespace], int]
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    epilog: str = ""


def run(
    prog: str, description: str, subcommands: Mapping[str, Subcommand], argv: Sequence[str], epilog: str = ""
) -> int:
    """Parse ``argv``, run the subcommand that it names, and return the exit code.

    Args:
        prog: Name of the command, such as "ringdance hosts".
        description: Purpose of the command.
        subcommands: Subcommands by name.
        argv: The words after ``prog``.
        epilog: Text at the end of the command's help.
    """

    def action() -> int:
        parser = Parser(prog=prog, description=description, epilog=epilog)
        group = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)
        for name, known in subcommands.items():
            text = f"{known.help[0].upper()}{known.help[1:]}."
            subparser = group.add_parser(name, help=known.help, description=text, epilog=known.epilog)
            known.add_arguments(subparser)
            subparser.set_defaults(subcommand=known)
        arguments = parser.parse_args(list(argv))
        chosen: Subcommand = arguments.subcommand
        return chosen.run(arguments)

    return as_program(prog, action)
