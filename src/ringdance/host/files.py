"""Read files that a job has left, which may be damaged or not files at all, and write texts as a whole."""

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
"""What reading a file raises whose content is not as expected."""
_LARGEST = {float: 1e16, int: 2.0**64}  # seconds that are a date, or microseconds; counters
# Plain words of YAML 1.2 that are not strings.
_YAML = {
    "null": r"~|null|Null|NULL|", "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}  # fmt: skip


def typed(found: dict[str, Any], key: str, kind: Any) -> Any:
    """Return a value of a JSON object; raises one of NO_FORMAT if it is no `kind`, such as ``int | None``."""
    if not _fits(found[key], kind):
        raise ValueError(f"{key} is no {kind}")
    return found[key]


def _fits(value: Any, kind: Any) -> bool:
    if kind in _LARGEST:
        return type(value) in (int, kind) and abs(value) < _LARGEST[kind]  # neither bool nor NaN
    outer, parts = get_origin(kind), get_args(kind)
    if outer is UnionType:
        return any(_fits(value, part) for part in parts)
    if type(value) is not (outer or kind):
        return False
    inner = value.values() if outer is dict else value if outer is list else ()
    return all(_fits(one, parts[-1]) for one in inner)


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise a LaunchError if a file is there and no regular one, such as a pipe, which may never end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise LaunchError(f"{path} is no regular file: copy what comes from it into one")


def read_regular(path: Path) -> str:
    """Return a file's text. Raises LaunchError if it cannot be read or is no regular file."""
    check_regular(path)
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror or error}") from None


@cache
def _yaml_loader() -> Any:
    """Return PyYAML's loader for YAML 1.2: it reads 1.1, where 1e-4 is a text, 1:2 is 62, and 010 is 8."""
    yaml: Any = optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml")
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for name, words in _YAML.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{words})$"), None)
    bases = {"0o": 8, "0x": 16}
    whole: Any = lambda _, node: int(node.value, bases.get(node.value[:2], 10))  # noqa: E731
    loader.add_constructor("tag:yaml.org,2002:int", whole)
    return loader


def read_yaml(text: str) -> Any:
    """Return the content of a text in YAML 1.2. Raises ValueError for another."""
    loader = _yaml_loader()
    yaml: Any = optional("yaml", LaunchError)
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def open_at_once(path: str, flags: int) -> int:
    """Open a file; a FIFO without a reader is an error, so that training does not wait for one."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def unique_beside(path: Path, word: str) -> Path:
    """Return a name next to a path that no other process uses."""
    return path.with_name(f".{path.name}.{word}-{os.uname().nodename}-{os.getpid()}")


def sync_path(path: Path) -> None:
    """Wait until a file, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_text(path: Path) -> AbstractContextManager[TextIO]:
    """Open a file for a text, like ``whole_file``."""
    return whole_file(path, "w", encoding="utf-8", errors="surrogateescape")


@contextmanager
def whole_file(path: Path, mode: str, synced: bool = False, **options: Any) -> Iterator[Any]:
    """Open a file that gets its name when it is complete, `synced` on disk; after an error nothing is left.

    Raises:
        OSError: The file cannot be written. ``filename`` is ``path``.
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
