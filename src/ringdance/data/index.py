"""Write, read and check the index of a split: ``train.json`` and ``train.npy``."""

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
_OPENED_BY = {IMAGES: "images. Use ringdance.data.Dataset", TABLE: "a table. Use ringdance.data.Table"}
_OWN_CHECKSUM, _NPY_CHECKSUM = "crc32", "npy_crc32"
_NO_INDEX = (ValueError, RecursionError, AttributeError, TypeError, KeyError)


def write_index(path: Path, about: dict[str, Any], array: np.ndarray[Any, Any] | None) -> None:
    """Write an index. A process that opens it concurrently finds the old index or none.

    Args:
        path: Path of the JSON file.
        about: Contents of the JSON file: "kind", "format", "files", and any entries specific to the kind.
        array: Contents of the ``.npy`` file next to the JSON file. If None, only the JSON file is written.
    """
    with ShardWriter(path) as index, ExitStack() as stack:
        if array is not None:
            other = stack.enter_context(ShardWriter(path.with_suffix(".npy")))
            other.write(data := npy(array))
            other.sync()  # before any renaming, so that a full disk leaves both old files in place
            about = about | {_NPY_CHECKSUM: zlib.crc32(data)}
        about = about | {_OWN_CHECKSUM: _checksum(about)}
        index.write(json.dumps(about, indent=1).encode() + b"\n")
        index.sync()


def _checksum(about: dict[str, Any]) -> int:
    """Return the CRC-32 of an index's canonical JSON. CRC-32C would need an optional package."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def read_json(path: Path, kind: str = "") -> dict[str, Any]:
    """Read an index's JSON file.

    Args:
        path: Path of the file.
        kind: Required kind of data set. An empty string accepts any kind.

    Raises:
        ArgumentError: The index is missing, damaged or of another kind.
    """
    try:
        about: dict[str, Any] = json.loads(path.read_bytes())
        checksum = about.pop(_OWN_CHECKSUM)
    except FileNotFoundError:
        raise _missing(path.parent, path.stem) from None
    except _NO_INDEX:
        raise damaged(path, "it is not the index of a split") from None
    if checksum != _checksum(about):
        raise damaged(path, "its checksum does not match its contents")
    if kind and about["kind"] != kind:
        raise ArgumentError(f"{path} is the index of {_OPENED_BY[about['kind']]} to open it.")
    return about


def is_index(path: Path) -> bool:
    """Return True if a JSON file is the index of a split, even if it is damaged."""
    try:
        about = json.loads(path.read_bytes())
        return path.with_suffix(".npy").exists() or {"format", "files"} <= about.keys()
    except (ValueError, RecursionError):
        return True
    except AttributeError:  # valid JSON, but not an object
        return False


def read_array(path: Path, about: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map an index's ``.npy`` file into memory. Its checksum must match the one in the JSON file.

    Raises:
        ArgumentError: The file is missing or damaged, or its checksum does not match.
    """
    try:
        if (crc := file_crc32(path)) != about[_NPY_CHECKSUM]:
            raise damaged(path, f"its checksum is {crc:08x}, not {about[_NPY_CHECKSUM]:08x} as in its index")
    except FileNotFoundError:
        raise damaged(path.with_suffix(".json"), f"its companion file {path.name} is missing") from None
    return read_npy(path)


def read_npy(path: Path) -> np.ndarray[Any, Any]:
    """Map a ``.npy`` file with a one-dimensional array into memory.

    Raises:
        ArgumentError: The file is damaged.
    """
    try:
        array: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ArgumentError):
        raise
    except Exception as error:  # NumPy raises many kinds of exceptions for a damaged header
        raise damaged(path, " ".join(str(error).split())) from None
    if array.ndim != 1:
        raise damaged(path, f"its array has {array.ndim} dimensions instead of one")
    return array


def damaged(path: Path, why: str) -> ArgumentError:
    """Return the error for a damaged index."""
    return ArgumentError(
        f"{path} is damaged: {why}. Copy it again, or recreate it with `ringdance data prepare --overwrite` "
        f"(or, if other tools wrote the files, with `ringdance data index {path.parent}`)"
    )


def _missing(directory: Path, split: str) -> ArgumentError:
    """Return the error for an index that does not exist."""
    others = sorted(path.stem for path in directory.glob("*.json") if is_index(path))
    begun = [path for name in (f"{split}.json", "run.*") for path in directory.glob(f".prepare/{name}")]
    if (directory / f"{split}.npy").exists():
        return damaged(directory / f"{split}.json", f"it is missing, but {split}.npy exists")
    if begun or ((directory / ".prepare/criteo.json").exists() and not others):
        hint = "`ringdance data prepare` was interrupted here: run the same command again to resume"
    else:
        maker = "Use `ringdance data prepare`, or `ringdance data index DIR` if other tools made the files"
        hint = f"Existing splits: {', '.join(others)}" if others else maker
    return ArgumentError(f"{directory}: no index for the split {split!r} ({split}.json is missing). {hint}.")
