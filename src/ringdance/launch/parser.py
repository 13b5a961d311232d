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
from typing import Any, NoReturn, TypeVar

from ringdance.errors import ArgumentError, LaunchError
from ringdance.launch.foreign import answer

T = TypeVar("T", int, float)
_UNKNOWN = "unrecognized arguments:"
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_COMMAND = (argparse.REMAINDER, argparse.PARSER)
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
        words = list(sys.argv[1:] if args is None else args)
        # First: argparse takes -hostfile for -h and -iface for -i.
        found, rest = None, self._foreign(words)
        if not rest:
            found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"{_UNKNOWN} {' '.join(rest)}")
        return found, rest

    def _foreign(self, words: Sequence[str]) -> list[str]:
        """Return the options before the command that are other launchers', or have other dashes than here."""
        known, found, values = self._option_string_actions, list[str](), 0
        has_command = any(one.nargs in _COMMAND for one in self._get_positional_actions())
        for word in words:
            option, equals, _ = word.partition("=")
            if word == "--" or (has_command and not values and not word.startswith("-")):
                break
            if not word.startswith("-"):
                values = max(0, values - 1)
            elif action := known.get(option):
                count = 1 if action.nargs is None else action.nargs
                values = count if isinstance(count, int) and not equals else 0
            elif any(one.startswith(option) for one in known) and (self.allow_abbrev or option[1:2] != "-"):
                values = 1  # argparse takes it for that option
            elif self._own(option) or answer(_plain(option), known):
                found.append(option)
                values = not equals
        return found

    def _own(self, option: str) -> str:
        """Return the option here that differs by dashes only, "" if there is none."""
        bare = _plain(option).replace("-", "")
        same = (one for one in self._option_string_actions if _plain(one).replace("-", "") == bare)
        return next(same, "") if len(bare) > 1 else ""

    def _hint(self, option: str) -> str:
        """Return what to write for an option that is not known; "" if there is nothing to say."""
        known = self._option_string_actions
        if not (meant := self._own(option)) and (text := answer(_plain(option), known)):
            return text
        plain = {_plain(one): one for one in known}
        near = difflib.get_close_matches(_plain(option), plain, n=1, cutoff=0.8)
        meant = meant or (plain[near[0]] if near else "")
        return f"did you mean {meant}?" if meant else ""

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message`, with what was probably meant, and exit with code 2."""
        hints = list[str]()
        if message.startswith(_UNKNOWN):
            options = [word.partition("=")[0] for word in message.split()[2:] if word.startswith("-")]
            several = len(options) > 1
            hints = [f"{one}: {hint}" if several else hint for one in options if (hint := self._hint(one))]
        elif choice := _CHOICE.search(message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[^\s,']+", choice[2]), n=1)
            hints = [f"did you mean {one}?" for one in near]
        elif message.endswith("expected one argument"):
            option = message.split()[1].split("/")[-1].rstrip(":")
            hints = [f"a value that begins with - follows an =, as in {option}=-x"]
        super().error("; ".join([message, *hints]))


def _plain(option: str) -> str:
    return option.lstrip("-").replace("_", "-")


def rank_count(text: str) -> int:
    """Return the number in `-n 2`; also in `-np2`, which argparse takes for `-n p2`."""
    try:
        return int(text.removeprefix("p"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks") from None


def at_least(kind: Callable[[str], T], least: float, below: float = math.inf) -> Callable[[str], T]:
    """Return the type of an option: numbers from ``least`` on, less than ``below``."""

    def parsed(text: str) -> T:
        value = kind(text)
        if not least <= value < below:
            limit = f", less than {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{limit}")
        return value

    parsed.__name__ = kind.__name__  # for the error of what is no number
    return parsed


positive = at_least(int, 1)


def counts(text: str) -> list[int]:
    """Return the whole numbers of "1,2,4", each 1 or more, ascending."""
    found = {int(word) if word.isdecimal() else 0 for word in text.split(",")}
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers from 1 on; give them as in 1,2,4")
    return sorted(found)


def number(text: str) -> float:
    """Return a number above 0."""
    if not 0 < (found := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a finite number, more than 0")
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
