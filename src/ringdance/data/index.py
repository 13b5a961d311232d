"""The index of a split, ``train.json`` and ``train.npy``: read, with what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.files import file_crc32c
from ringdance.errors import ArgumentError

VERSION = 1
CHECKSUM, TABLE = "npy_crc32c", "table"
"""Entries of the JSON file: of the whole ``.npy`` file, missing in indexes of earlier versions; its kind."""
Entry = tuple[str, Callable[[Any], bool]]
_COUNT: Entry = "a count", lambda value: type(value) is int and 0 <= value < 1 << 53
_TEXT: Entry = "a text", lambda value: isinstance(value, str) and value != "" and "\0" not in value
_ENTRIES: dict[str, Entry] = {
    "version": (str(VERSION), lambda value: value == VERSION), "format": _TEXT,
    "kind": (repr(TABLE), lambda value: value == TABLE),
    "files": ("a list", lambda value: isinstance(value, list)),
    "fields": ("1 to 65535", lambda value: type(value) is int and 0 < value < 1 << 16), "table_size": _COUNT,
    CHECKSUM: _COUNT, "name": _TEXT, "size": _COUNT, "rows": _COUNT,
    "samples": _COUNT, "crc32c": ("a count or null", lambda value: value is None or _COUNT[1](value)),
    "first_label": ("0, 1 or null", lambda value: value in (0, 1, None)),
    "classes": ("texts", lambda value: isinstance(value, list) and all(map(_TEXT[1], value))),
}  # fmt: skip
_FORMATS = {True: ("rows", "tfrecord", "libsvm", "csv"), False: ("tfrecord", "webdataset")}


def read_json(path: Path) -> dict[str, Any]:
    """Read an index's JSON file.

    Raises:
        ArgumentError: it is missing, or no index; says at which place it is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _missing(path.parent, path.stem) from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error) or "empty") from None
    is_table = isinstance(found, dict) and found.get("kind") == TABLE
    own, count = (("fields", "table_size"), "rows") if is_table else (("classes",), "samples")
    if why := _wrong("it", found, {"version", "format", "files", *own}):
        raise damaged(path, why)
    for number, file in enumerate(found["files"]):
        if why := _wrong(f"files[{number}]", file, wanted := {"name", "size", "crc32c", count}):
            raise damaged(path, why)
        if more := file.keys() - wanted:
            raise damaged(path, f"files[{number}] has {', '.join(sorted(more))}")
        if file[count] > file["size"]:
            raise damaged(path, f"files[{number}] has {file[count]} {count} in {file['size']} bytes")
    if found["format"] not in _FORMATS[is_table]:
        raise damaged(path, f"format is {found['format']!r}, not one of {', '.join(_FORMATS[is_table])}")
    return dict(found)


def is_index(path: Path) -> bool:
    """Whether a JSON file is a split's, perhaps damaged."""
    try:
        found = json.loads(path.read_bytes())
        return path.with_suffix(".npy").exists() or {"format", "files"} <= found.keys()
    except (ValueError, RecursionError):
        return True
    except AttributeError:  # a list, say
        return False


def _wrong(what: str, entries: Any, needed: set[str]) -> str:
    """Return what is wrong with an object of an index, "" if it is right."""
    if missing := needed - (entries.keys() if isinstance(entries, dict) else set()):
        return f"{what} has no {', '.join(sorted(missing))}"
    wrong = (name for name, value in entries.items() if name in _ENTRIES and not _ENTRIES[name][1](value))
    return next((f"{name} of {what} is {entries[name]!r:.40}, not {_ENTRIES[name][0]}" for name in wrong), "")


def read_npy(path: Path, about: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map an index's ``.npy`` file into memory, if its checksum is that of the JSON file.

    Raises:
        ArgumentError: it is damaged, or belongs to another JSON file.
    """
    try:
        if CHECKSUM in about and (crc := file_crc32c(path)) != about[CHECKSUM]:
            raise damaged(path, f"checksum {crc:08x}, and {about[CHECKSUM]:08x} by the .json")
        found: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise damaged(path.with_suffix(".json"), f"{path.name}, its other half, is missing") from None
    except (OSError, ArgumentError):
        raise
    except Exception as error:  # its header is Python: a damaged one ends in errors of any kind
        raise damaged(path, " ".join(str(error).split())) from None
    if found.ndim != 1:
        raise damaged(path, f"it holds {found.ndim} dimensions, not 1")
    return found


def damaged(path: Path, why: str) -> ArgumentError:
    """Return the error of a damaged index."""
    return ArgumentError(
        f"{path} is damaged: {why}. Copy it again, or write it again: `ringdance data prepare` with "
        f"--overwrite, or for files of others `ringdance data index {path.parent}`"
    )


def _missing(directory: Path, split: str) -> ArgumentError:
    """Return the error of an index that is not there."""
    others = sorted(one.stem for one in directory.glob("*.json") if is_index(one))
    begun = [path for name in (f"{split}.json", "run.*") for path in directory.glob(f".prepare/{name}")]
    if (directory / f"{split}.npy").exists():
        return damaged(directory / f"{split}.json", f"it is missing, {split}.npy, its other half, is there")
    if begun or ((directory / ".prepare/criteo.json").exists() and not others):
        hint = "`ringdance data prepare` was interrupted here: run the same command again, it resumes"
    else:
        maker = "`ringdance data prepare` makes one, `ringdance data index DIR` for files of others"
        hint = f"It has {', '.join(others)}" if others else maker
    return ArgumentError(f"{directory}: no index of {split!r} ({split}.json is missing). {hint}.")
