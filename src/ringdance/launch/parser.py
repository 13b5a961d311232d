"""Command lines: a parser whose errors suggest what was probably meant, and what a program ends with."""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ringdance.errors import ArgumentError, LaunchError

_UNKNOWN = "unrecognized arguments:"
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_CHOICE = re.compile(r"invalid choice: '?([^'\s]*)'? \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors name the option or command that comes closest.

    Unless given otherwise, texts keep their lines, and options cannot be abbreviated.
    """

    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": raw, "allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and end with an error of this (sub)command where something is not known to it."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{_UNKNOWN} {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, with what was probably meant, and exit with code 2."""
        word, known, choice = "", list[str](), _CHOICE.search(message)
        if message.startswith(_UNKNOWN):
            word = next((w.partition("=")[0] for w in message.split()[2:] if w.startswith("-")), "")
            known = list(self._option_string_actions)
        elif choice:
            word, known = choice[1], re.findall(r"[^\s,']+", choice[2])
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def rank_count(text: str) -> int:
    """Return the number in `-n 2`; also in `-np2`, which argparse takes for `-n p2`."""
    try:
        return int(text.removeprefix("p"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks") from None


def positive(text: str) -> int:
    """Return a whole number, 1 or more."""
    if (found := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return found


def counts(text: str) -> list[int]:
    """Return the whole numbers of "1,2,4", each 1 or more, ascending."""
    found = {int(word) if word.isdecimal() else 0 for word in text.split(",")}
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers from 1 on; give them as in 1,2,4")
    return sorted(found)


def number(text: str) -> float:
    """Return a number above 0."""
    if not 0 < (found := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return found


def seconds(text: str) -> float:
    """Return a time in seconds, more than 0."""
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return found


def as_program(name: str, action: Callable[[], int]) -> int:
    """Return the exit code of a command line's `action`; print what it raises in one line."""
    try:
        return action()
    except SystemExit as end:  # argparse has printed the error or the help
        return int(end.code or 0)
    except (ArgumentError, LaunchError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:  # before the job's own handling
        return 130
    except BrokenPipeError:  # the reader of our output has ended, as in `ringdance run ... | head`
        # Else the interpreter complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        kind = "disk" if error.errno in _OF_A_DISK else type(error).__name__
        print(f"{name}: {error.filename or kind}: {error.strerror or error}", file=sys.stderr)
        return 2
