"""Command-line parsing with errors that suggest the intended option, and a common wrapper for main()."""

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
    """An ArgumentParser whose errors suggest the closest option or command.

    By default, help texts keep their line breaks, and options cannot be abbreviated.
    """

    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": raw, "allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments. Unknown arguments are reported by the command or subcommand that got them."""
        words = list(sys.argv[1:] if args is None else args)
        # Look for other launchers' options first: argparse would parse -hostfile as -h, and -iface as -i.
        parsed, rest = None, self._foreign(words)
        if not rest:
            parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"{_UNKNOWN} {' '.join(rest)}")
        return parsed, rest

    def _foreign(self, words: Sequence[str]) -> list[str]:
        """Return the options before the command that have wrong dashes or belong to another launcher."""
        known, foreign, values = self._option_string_actions, list[str](), 0
        has_command = any(action.nargs in _COMMAND for action in self._get_positional_actions())
        for word in words:
            option, equals, _ = word.partition("=")
            if word == "--" or (has_command and not values and not word.startswith("-")):
                break
            if not word.startswith("-"):
                values = max(0, values - 1)
            elif action := known.get(option):
                count = 1 if action.nargs is None else action.nargs
                values = count if isinstance(count, int) and not equals else 0
            elif any(name.startswith(option) for name in known) and (self.allow_abbrev or option[1:2] != "-"):
                values = 1  # an abbreviated option, which argparse expands
            elif self._own(option) or answer(_plain(option), known):
                foreign.append(option)
                values = not equals
        return foreign

    def _own(self, option: str) -> str:
        """Return this parser's option that differs from ``option`` only in dashes, if any, otherwise ""."""
        bare = _plain(option).replace("-", "")
        same = (name for name in self._option_string_actions if _plain(name).replace("-", "") == bare)
        return next(same, "") if len(bare) > 1 else ""

    def _hint(self, option: str) -> str:
        """Return a suggestion for replacing an unknown option, or an empty string if there is none."""
        known = self._option_string_actions
        if not (meant := self._own(option)) and (text := answer(_plain(option), known)):
            return text
        plain = {_plain(name): name for name in known}
        near = difflib.get_close_matches(_plain(option), plain, n=1, cutoff=0.8)
        meant = meant or (plain[near[0]] if near else "")
        return f"did you mean {meant}?" if meant else ""

    def error(self, message: str) -> NoReturn:
        """Print the usage, then ``message`` with a suggestion, and exit with code 2."""
        hints = list[str]()
        if message.startswith(_UNKNOWN):
            options = [word.partition("=")[0] for word in message.split()[2:] if word.startswith("-")]
            several = len(options) > 1
            hints = [f"{word}: {hint}" if several else hint for word in options if (hint := self._hint(word))]
        elif choice := _CHOICE.search(message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[^\s,']+", choice[2]), n=1)
            hints = [f"did you mean {choice}?" for choice in near]
        elif message.endswith("expected one argument"):
            option = message.split()[1].split("/")[-1].rstrip(":")
            hints = [f"to pass a value that starts with -, write {option}=-x"]
        super().error("; ".join([message, *hints]))


def _plain(option: str) -> str:
    return option.lstrip("-").replace("_", "-")


def rank_count(text: str) -> int:
    """Parse the value of ``-n``. Also accepts ``p2``, because argparse parses ``-np2`` as ``-n p2``."""
    try:
        return int(text.removeprefix("p"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a valid number of ranks") from None


def at_least(kind: Callable[[str], T], least: float, below: float = math.inf) -> Callable[[str], T]:
    """Return an argparse type for numbers from ``least`` up to, but not including, ``below``."""

    def parsed(text: str) -> T:
        value = kind(text)
        if not least <= value < below:
            limit = f" and less than {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least:g}{limit}")
        return value

    parsed.__name__ = kind.__name__  # argparse shows this name in its errors
    return parsed


positive = at_least(int, 1)


def counts(text: str) -> list[int]:
    """Parse a list of positive integers such as "1,2,4". Return them in ascending order."""
    numbers = {int(word) if word.isdecimal() else 0 for word in text.split(",")}
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers, such as 1,2,4")
    return sorted(numbers)


def number(text: str) -> float:
    """Parse a positive number."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number greater than 0")
    return value


def as_program(name: str, action: Callable[[], int]) -> int:
    """Run ``action``, the body of a command, and return its exit code. Errors are printed on one line."""
    try:
        return action()
    except SystemExit as end:  # argparse has already printed the error or the help
        return int(end.code or 0)
    except (ArgumentError, LaunchError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:  # Ctrl-C before a job has installed its signal handlers
        return 130
    except BrokenPipeError:  # the reader has exited, for example `head` in `ringdance run ... | head`
        # Redirect stdout. Otherwise, the interpreter would report an error when it flushes stdout on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        kind = "disk" if error.errno in _OF_A_DISK else type(error).__name__
        print(f"{name}: {error.filename or kind}: {error.strerror or error}", file=sys.stderr)
        return 2
