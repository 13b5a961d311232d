"""Parsers that convert the text of environment variables to the values of settings.

Every parser takes non-empty text and returns the value, or raises ``ValueError``. ``Parser.expected``
describes the accepted text for error messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True}
SWITCH_WORDS |= {"0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Parser(Generic[T]):
    """The parser for one kind of value.

    Attributes:
        expected: Description of valid text, which completes "expected …".
        convert: Converts text to a value. Raises ``ValueError`` if the text is not valid.
        accepts: Returns True if the value can be used.
        legacy: Replaces ``convert`` for a ``HOROVOD_*`` name if Horovod reads the text differently.
    """

    expected: str
    convert: Callable[[str], T]
    accepts: Callable[[T], bool] = lambda value: True
    legacy: Callable[[str], T] | None = None

    def parse(self, text: str, legacy: bool = False) -> T:
        """Parse ``text``, in the same way as Horovod if ``legacy`` is True.

        Raises:
            ValueError: The text cannot be used.
        """
        value = (self.legacy if legacy and self.legacy else self.convert)(text)
        if not self.accepts(value):
            raise ValueError(text)
        return value


def _switch(text: str) -> bool:
    if text.lower() not in SWITCH_WORDS:
        raise ValueError(text)
    return SWITCH_WORDS[text.lower()]


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _FACTOR[match[2].lower()]


def _is_address(text: str) -> bool:
    port = text.rpartition(":")[2]
    return port.isdecimal() and int(port) <= 65535


def _steps(text: str) -> tuple[int, ...]:
    first, end = text.split(":")
    return int(first or 0), int(end)


def choice(*words: str) -> Parser[str]:
    """Return a parser for one of ``words``, which must be lowercase. Parsing ignores case."""
    return Parser("one of " + ", ".join(words), str.lower, words.__contains__)


SWITCH = Parser(
    "1 or 0 (also true/false, yes/no, on/off)",
    _switch,
    legacy=lambda text: int(text) > 0,  # Horovod parses an integer, and treats positive values as on
)
BYTES = Parser("a number of bytes, such as 524288, 512K or 64M (powers of 1024)", _bytes)
COUNT = Parser("a non-negative integer", int, lambda value: value >= 0)
AT_LEAST_ONE = Parser("a positive integer", int, lambda value: value >= 1)
NUMBER = Parser("a non-negative number", float, lambda value: 0 <= value < math.inf)
POSITIVE = Parser("a positive number", float, lambda value: 0 < value < math.inf)
TEXT = Parser("text", str)
ADDRESS = Parser("a port from 0 to 65535, or ADDRESS:PORT", str, _is_address)
STEPS = Parser(
    "the first step and the step after the last, counted from 0, such as 100:110",
    _steps,
    lambda steps: 0 <= steps[0] < steps[1],
)
