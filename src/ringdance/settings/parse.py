"""How the text of an environment variable becomes the value of a setting.

Every parser takes text that is not empty and returns the value or raises ``ValueError``;
what it accepts is in :attr:`Parser.expected`, for the message.
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
    """One kind of value.

    Attributes:
        expected: what can be written, as the end of "expected …".
        parse: text to value; ``ValueError`` if it cannot be used.
        legacy: the same for a ``HOROVOD_*`` name, where Horovod reads it differently.
    """

    expected: str
    parse: Callable[[str], T]
    legacy: Callable[[str], T]


def _plain(expected: str, parse: Callable[[str], T]) -> Parser[T]:
    return Parser(expected, parse, parse)


def _switch(text: str) -> bool:
    try:
        return SWITCH_WORDS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _FACTOR[match[2].lower()]


def _bounded(value: T, good: bool) -> T:
    if not good:
        raise ValueError(value)
    return value


def integer(minimum: int = 0) -> Parser[int]:
    """Whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        value = int(text)
        return _bounded(value, value >= minimum)

    return _plain(f"a whole number, {minimum} or more", parse)


def number(minimum: float = 0.0, *, above: bool = False) -> Parser[float]:
    """Finite numbers from `minimum` on; with `above`, greater than it."""

    def parse(text: str) -> float:
        value = float(text)
        return _bounded(value, math.isfinite(value) and (value > minimum if above else value >= minimum))

    return _plain(f"a number {'greater than' if above else 'not below'} {minimum:g}", parse)


def choice(*words: str) -> Parser[str]:
    """One of `words`, in any case; the value is spelt as here."""

    def parse(text: str) -> str:
        for word in words:
            if word.lower() == text.lower():
                return word
        raise ValueError(text)

    return _plain("one of " + ", ".join(words), parse)


def _cores(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    return _bounded(numbers, min(numbers) >= 0)


SWITCH: Parser[bool] = Parser(
    "1 or 0 (also true/false, yes/no, on/off)",
    _switch,
    lambda text: int(text) > 0,  # Horovod: a whole number, positive means on
)
BYTES: Parser[int] = _plain("a number of bytes, such as 524288, 512K or 64M (powers of 1024)", _bytes)
TEXT: Parser[str] = _plain("text", str)
CORES: Parser[tuple[int, ...]] = _plain("core numbers separated by commas, one for each local rank", _cores)
