"""The index of a split, ``train.json`` and ``train.npy``: written, and read with what is wrong with it."""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.files import ShardWriter, file_crc32, npy
from ringdance.errors import ArgumentError

IMAGES, TABLE = "images", "table"
"""Kinds of data sets."""
_OPENED_BY = {IMAGES: "images: ringdance.data.Dataset", TABLE: "a table: ringdance.data.Table"}
_OWN_CHECKSUM, _NPY_CHECKSUM = "crc32", "npy_crc32"
_NO_INDEX = (ValueError, RecursionError, AttributeError, TypeError, KeyError)


def write_index(path: Path, about: dict[str, Any], array: np.ndarray[Any, Any] | None) -> None:
    """Write an index. A process that opens it meanwhile finds the old one or none.

    Args:
        path: The JSON file.
        about: What it says: "kind", "format" and "files", and what else its kind has.
        array: Goes into the ``.npy`` file of the same name; None: there is no such file.
    """
    with ShardWriter(path) as index, ExitStack() as stack:
        if array is not None:
            other = stack.enter_context(ShardWriter(path.with_suffix(".npy")))
            other.write(data := npy(array))
            other.sync()  # before one of them gets its name: both do, or none if the disk is full
            about = about | {_NPY_CHECKSUM: zlib.crc32(data)}
        about = about | {_OWN_CHECKSUM: _checksum(about)}
        index.write(json.dumps(about, indent=1).encode() + b"\n")
        index.sync()


def _checksum(about: dict[str, Any]) -> int:
    """Return the CRC-32 of an index's JSON, however it is formatted. Loaders need no package for it."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def read_json(path: Path, kind: str = "") -> dict[str, Any]:
    """Read an index's JSON file.

    Args:
        path: Of the file.
        kind: What it must be the index of; "": anything.

    Raises:
        ArgumentError: It is missing, damaged or of another kind.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        checksum = found.pop(_OWN_CHECKSUM)
    except FileNotFoundError:
        raise _missing(path.parent, path.stem) from None
    except _NO_INDEX:
        raise damaged(path, "it is not an index") from None
    if checksum != _checksum(found):
        raise damaged(path, "its checksum is another one")
    if kind and found["kind"] != kind:
        raise ArgumentError(f"{path} is the index of {_OPENED_BY[found['kind']]} opens it.")
    return found


def is_index(path: Path) -> bool:
    """Whether a JSON file is a split's, perhaps damaged."""
    try:
        found = json.loads(path.read_bytes())
        return path.with_suffix(".npy").exists() or {"format", "files"} <= found.keys()
    except (ValueError, RecursionError):
        return True
    except AttributeError:  # a list, say
        return False


def read_array(path: Path, about: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map an index's ``.npy`` file into memory, if it belongs to what its JSON file says.

    Raises:
        ArgumentError: It is damaged, or belongs to another JSON file.
    """
    try:
        if (crc := file_crc32(path)) != about[_NPY_CHECKSUM]:
            raise damaged(path, f"checksum {crc:08x}, and {about[_NPY_CHECKSUM]:08x} by the .json")
    except FileNotFoundError:
        raise damaged(path.with_suffix(".json"), f"{path.name}, its other half, is missing") from None
    return read_npy(path)


def read_npy(path: Path) -> np.ndarray[Any, Any]:
    """Map a ``.npy`` file with an array of one dimension into memory.

    Raises:
        ArgumentError: It is damaged.
    """
    try:
        found: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="r")
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
