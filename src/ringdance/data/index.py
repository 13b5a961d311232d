"""The index of a split, ``train.json`` and ``train.npy``: read, with what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ringdance.data.files import file_crc32c
from ringdance.errors import ArgumentError

CHECKSUM = "npy_crc32c"
"""Entry of the JSON file: of the whole ``.npy`` file; missing in indexes of earlier versions."""


def read_json(path: Path) -> dict[str, Any]:
    """Read an index's JSON file.

    Raises:
        ArgumentError: it is no index; says at which place it is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error) or "empty") from None
    missing = {"version", "format", "files"} - (found.keys() if isinstance(found, dict) else set())
    if missing:
        raise damaged(path, f"it has no {', '.join(sorted(missing))}")
    return dict(found)


def read_npy(path: Path, about: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Map an index's ``.npy`` file into memory, if its checksum is that of the JSON file.

    Raises:
        ArgumentError: it is damaged, or belongs to another JSON file.
    """
    try:
        found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise damaged(path, str(error)) from None
    if CHECKSUM in about and (crc := file_crc32c(path)) != about[CHECKSUM]:
        raise damaged(path, f"checksum {crc:08x}, and {about[CHECKSUM]:08x} by the .json")
    return found


def damaged(path: Path, why: str) -> ArgumentError:
    """Return the error of a damaged index."""
    return ArgumentError(
        f"{path} is damaged: {why}. Copy it again, or write it again: `ringdance data prepare` with "
        f"--overwrite, or for files of others `ringdance data index {path.parent}`"
    )


def missing(directory: Path, split: str, end: str, maker: str) -> ArgumentError:
    """Return the error of an index that is not there.

    Args:
        directory: of the data set.
        split: that was looked for.
        end: of files that other splits have, such as ".npy".
        maker: what makes such an index.
    """
    others = sorted(one.stem for one in directory.glob(f"*{end}"))
    if any(directory.glob(".prepare/run.*")):
        hint = "`ringdance data prepare` was interrupted here: run the same command again, it resumes"
    else:
        hint = f"It has {', '.join(others)}" if others else maker
    return ArgumentError(f"{directory}: no index of {split!r} ({split}.json is missing). {hint}.")
