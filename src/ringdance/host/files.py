"""Read files that a job has left behind, and write text files atomically.

A file that is read may be damaged, or may not be a regular file at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, get_args, get_origin

from ringdance.errors import LaunchError, optional

NO_FORMAT = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Exceptions that may be raised if a file's content does not have the expected format."""
_LARGEST = {float: 1e16, int: 2.0**64}  # upper bounds for times (in s or µs) and for counters
# Plain scalars of YAML 1.2 that are not strings.
_YAML = {
    "null": r"~|null|Null|NULL|", "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}  # fmt: skip


def typed(found: dict[str, Any], key: str, kind: Any) -> Any:
    """Return ``found[key]`` if its type is ``kind``. Otherwise, raise one of the exceptions NO_FORMAT."""
    if not _fits(found[key], kind):
        raise ValueError(f"the value of {key} must have the type {kind}")
    return found[key]


def _fits(value: Any, kind: Any) -> bool:
    if kind in _LARGEST:
        return type(value) in (int, kind) and abs(value) < _LARGEST[kind]  # excludes bool and NaN
    outer, parts = get_origin(kind), get_args(kind)
    if outer is UnionType:
        return any(_fits(value, part) for part in parts)
    if type(value) is not (outer or kind):
        return False
    inner = value.values() if outer is dict else value if outer is list else ()
    return all(_fits(item, parts[-1]) for item in inner)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise LaunchError if the path exists but is not a regular file. Reading from a pipe may block."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise LaunchError(
            f"{path} is not a regular file. Copy its content to a regular file, and pass that file."
        )


def read_regular(path: Path) -> str:
    """Return a file's text. Raises LaunchError if it cannot be read or is not a regular file."""
    check_regular(path)
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror or error}") from None


@cache
def _yaml_loader(yaml: Any) -> Any:
    """Return PyYAML's loader, adapted to YAML 1.2. In YAML 1.1, 1e-4 is a string, 1:2 is 62 and 010 is 8."""
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for name, words in _YAML.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{words})$"), None)
    bases = {"0o": 8, "0x": 16}
    whole: Any = lambda _, node: int(node.value, bases.get(node.value[:2], 10))  # noqa: E731
    loader.add_constructor("tag:yaml.org,2002:int", whole)
    return loader


def read_yaml(text: str) -> Any:
    """Parse a text as YAML 1.2. Raises ValueError if it is not valid."""
    yaml: Any = optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml")
    try:
        return yaml.load(text, _yaml_loader(yaml))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking. Raises OSError for a FIFO without a reader, so training never waits."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def unique_beside(path: Path, word: str) -> Path:
    """Return a hidden path next to ``path``, marked with ``word``, that no other process uses."""
    return path.with_name(f".{path.name}.{word}-{os.uname().nodename}-{os.getpid()}")


def sync_path(path: Path) -> None:
    """Wait until a file's contents or a directory's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_text(path: Path) -> AbstractContextManager[TextIO]:
    """Open a text file for writing that appears only when it is complete. See ``whole_file``."""
    return whole_file(path, "w", encoding="utf-8", errors="surrogateescape")


@contextmanager
def whole_file(path: Path, mode: str, synced: bool = False, **options: Any) -> Iterator[Any]:
    """Write a file that appears under its name only when it is complete. An error leaves nothing behind.

    Args:
        path: Name of the complete file.
        mode: Mode for ``open``.
        synced: If True, wait until the file and its name are on disk.
        options: Further arguments for ``open``.

    Raises:
        OSError: The file cannot be written. Its ``filename`` is ``path``.

    """
    partial = unique_beside(path, "partial")
    try:
        with open(str(partial), mode, **options) as file:
            yield file
        if synced:
            sync_path(partial)
        os.replace(partial, path)
        if synced:
            sync_path(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial), partial):
            error.filename = str(path)
        raise
