"""Dataclasses whose fields are options of a command line too.

Note [Options from fields]
~~~~~~~~~~~~~~~~~~~~~~~~~~
What a job is made of is written once: a field declared by :func:`option` holds its help text, its flags and
what it may be. :func:`add_options` makes an argparse option of each such field, :func:`from_arguments` makes
the object of what argparse has found, and :func:`check_options` checks an object, however it was made.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ringdance.errors import LaunchError

T = TypeVar("T")


def option(
    help: str,
    default: Any = None,
    *flags: str,
    convert: Callable[[Any], Any] = lambda given: given,
    minimum: int | None = None,
    pattern: str = "",
    form: str = "",
    key: str = "",
    **arguments: Any,
) -> Any:
    """Declare a dataclass field that is a command-line option.

    Args:
        help: its help text, to which the default is added.
        default: its value if it is not given. False: an option without a value; ``list`` or ``dict``: an
            option that may be given several times.
        flags: default: the field's name; a name without dashes is positional.
        convert: makes the field's value of the text, or of the list of texts.
        minimum: smallest number.
        pattern: regular expression for the whole text.
        form: what the text must be, for the error message.
        key: where the value stands in a request to a service.
        **arguments: more arguments of ``add_argument``.
    """
    if default is False:
        arguments["action"] = "store_true"
    elif default in (list, dict):
        arguments = {"action": "append", "default": [], **arguments}
    else:
        arguments = {"default": default, **arguments}
        if isinstance(default, int):
            arguments["type"] = int
        if arguments.get("type") is int:
            arguments.setdefault("metavar", "N")
        if default not in (None, "", ()) and "default" not in help:
            help += " (default: %(default)s)"
    metadata = {
        "flags": flags, "arguments": {"help": help, **arguments}, "convert": convert, "minimum": minimum,
        "pattern": pattern, "form": form, **({"key": key} if key else {}),
    }  # fmt: skip
    if default in (list, dict):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _options(kind: Any) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Iterate over the options among a dataclass's fields: name, flag for messages, declaration."""
    for item in dataclasses.fields(kind):
        if "flags" in item.metadata:
            yield item.name, [f"--{item.name.replace('_', '-')}", *item.metadata["flags"]][-1], item.metadata


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add an option to `parser` for each field of the dataclass `kind` that was declared as one."""
    for name, flag, known in _options(kind):
        if flag.startswith("-"):
            parser.add_argument(*(known["flags"] or [flag]), dest=name, **known["arguments"])
        else:
            parser.add_argument(name, metavar=flag, **known["arguments"])


def from_arguments(kind: type[T], arguments: argparse.Namespace, **more: Any) -> T:
    """Make an object of the dataclass `kind` from parsed arguments, with `more` of its fields."""
    values = {name: known["convert"](getattr(arguments, name)) for name, _, known in _options(kind)}
    return kind(**values | more)


def check_options(job: Any) -> None:
    """Check the fields of `job` against their declarations.

    Raises:
        LaunchError: a value is too small, none of the choices, or not of the required form.
    """
    for name, flag, known in _options(job):
        value, choices = getattr(job, name), known["arguments"].get("choices")
        if value is None or value == "":
            continue
        if known["minimum"] is not None and value < known["minimum"]:
            raise LaunchError(f"{flag} {value}: must be at least {known['minimum']}")
        if choices and value not in choices:
            raise LaunchError(f"{flag} {value}: must be one of {', '.join(choices)}")
        if known["pattern"] and not re.fullmatch(known["pattern"], value):
            raise LaunchError(f"{flag} {value}: {known['form']}")


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Split texts of the form NAME=VALUE.

    Raises:
        LaunchError: a text has another form.
    """
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise LaunchError(f"{flag} {text}: write NAME=VALUE")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}
