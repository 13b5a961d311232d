"""Dataclasses whose fields are also command-line options.

Note [Options from fields]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Each property of a job is declared once. A field declared with ``option`` defines its help text, its flags and
its valid values. ``add_options`` adds an argparse option for each such field, ``from_arguments`` creates the
object from the parsed arguments, and ``check_options`` checks an object, however it was created.
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
    help: str, default: Any = None, *flags: str, convert: Callable[[Any], Any] = lambda given: given,
    minimum: int | None = None, pattern: str = "", form: str = "", key: str = "", **arguments: Any,
) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Args:
        help: Help text. The default value is appended to it.
        default: Value if the option is not set. False declares a flag that takes no value. ``list`` or
            ``dict`` declares an option that may be repeated.
        flags: Names of the option. Default: the field's name. A name without dashes is positional.
        convert: Converts the option's text, or list of texts, to the field's value.
        minimum: Smallest valid number.
        pattern: Regular expression that must match the entire text.
        form: Description of the required form, for the error message.
        key: Path of the value in the request that is sent to a cloud service.
        **arguments: Further arguments for ``add_argument``.
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
    """Yield the name, the flag to show in messages, and the declaration of each field that is an option."""
    for item in dataclasses.fields(kind):
        if "flags" in item.metadata:
            yield item.name, [f"--{item.name.replace('_', '-')}", *item.metadata["flags"]][-1], item.metadata


def add_options(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add an option to ``parser`` for each field of the dataclass ``kind`` declared with ``option``."""
    for name, flag, known in _options(kind):
        if flag.startswith("-"):
            parser.add_argument(*(known["flags"] or [flag]), dest=name, **known["arguments"])
        else:
            parser.add_argument(name, metavar=flag, **known["arguments"])


def from_arguments(kind: type[T], arguments: argparse.Namespace, **more: Any) -> T:
    """Create an instance of ``kind`` from parsed arguments. ``more`` sets further fields."""
    values = {name: known["convert"](getattr(arguments, name)) for name, _, known in _options(kind)}
    return kind(**values | more)


def check_options(job: Any) -> None:
    """Check the fields of ``job`` against their declarations.

    Raises:
        LaunchError: A value is too small, is not one of the choices, or does not have the required form.
    """
    for name, flag, known in _options(job):
        value, choices = getattr(job, name), known["arguments"].get("choices")
        if value is None or value == "":
            continue
        if known["minimum"] is not None and value < known["minimum"]:
            raise LaunchError(f"{flag} {value}: must be at least {known['minimum']}.")
        if choices and value not in choices:
            raise LaunchError(f"{flag} {value}: must be one of {', '.join(choices)}.")
        if known["pattern"] and not re.fullmatch(known["pattern"], value):
            raise LaunchError(f"{flag} {value}: {known['form']}")


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Split texts of the form NAME=VALUE.

    Raises:
        LaunchError: A text does not have this form.
    """
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise LaunchError(f"{flag} {text}: expected NAME=VALUE.")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}
