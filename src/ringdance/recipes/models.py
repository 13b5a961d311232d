"""Export models atomically, read and verify exported models, and format scores."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import ringdance.numpy as hvd
from ringdance.data.files import file_crc32, why_not
from ringdance.errors import ArgumentError
from ringdance.host.files import whole_text

_NOT_A_FILE = "is missing, or is not a regular file"


def export(
    given: argparse.Namespace, write: Callable[[Path], None], about: dict[str, Any],
    table: hvd.EmbeddingTable | None,
) -> None:
    """Export a model for score.py. The directory is renamed only after it is complete. Collective.

    Args:
        given: Options of the recipe. ``given.export`` is the target directory.
        write: Writes the model's files to the directory that is passed to it. Called on rank 0.
        about: Contents of model.json, except the checksums.
        table: Embedding table to export with the model, if any.

    Raises:
        SystemExit: The model could not be written. Raised on all ranks.
    """
    final = Path(given.export).resolve()
    partial, old = (final.with_name(f".{final.name}.{word}") for word in ("partial", "old"))

    def begin() -> None:
        if old.exists() and not final.exists():  # an earlier export was killed between its two renames
            os.replace(old, final)
        for left in partial, old:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete() -> str:
        try:
            write(partial)
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            checksums = {str(path.relative_to(partial)): file_crc32(path) for path in files}
            (partial / "model.json").write_text(json.dumps(about | {"checksums": checksums}, indent=1))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        problem = wrong_target(given)  # other programs may have written there since the start
        try:
            if final.exists() and not problem:
                os.replace(final, old)
            if not problem:
                os.replace(partial, final)
        except OSError as error:
            problem = _not_written(given.export, error)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        return problem and f"{problem}. The model is in {partial}"

    _on_rank_0(given.export, begin)
    if table is not None:
        try:
            table.save(partial / "table.npy")
        except OSError as error:
            raise SystemExit(_not_written(given.export, error)) from None
    _on_rank_0(given.export, complete)


def _on_rank_0(name: str, action: Callable[[], str | None]) -> None:
    """Run an action on rank 0. If it raises or returns an error message, exit on all ranks."""
    problem = ""
    # The action can take long. Without the pause, the waiting ranks would report a stall.
    with hvd.pause_stall_check("export"):
        if hvd.rank() == 0:
            try:
                problem = action() or ""
            except Exception as error:  # frameworks raise many kinds of exceptions
                problem = _not_written(name, error)
        problem = hvd.broadcast_object(problem)
    if problem:
        raise SystemExit(problem)


def _not_written(name: str, error: Exception) -> str:
    return f"--export {name}: {why_not(error, Path(name).resolve().parent)}"


def wrong_target(given: argparse.Namespace) -> str:
    """Return an error message if the target of ``--export`` cannot be used, otherwise an empty string."""
    if not given.export:
        return ""
    target = Path(given.export).resolve()
    if given.checkpoints and target in (kept := Path(given.checkpoints).resolve(), *kept.parents):
        return f"--export {given.export} would replace --checkpoints {given.checkpoints}. Use another path"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        existing = {path.name for path in target.iterdir()} if target.exists() else set()
        if "model.json" in existing:
            own = (name.partition("/")[0] for name in about_model(target)["checksums"])
            existing -= {"model.json", *own}
        if existing:
            return f"--export {given.export} contains other files, such as {min(existing)}"
        if os.path.ismount(target):
            return f"--export {given.export} is a mount point. Use a directory in it"
        if not os.access(target.parent, os.W_OK):
            return f"--export {given.export}: {target.parent} is not writable"
    except OSError as error:
        return f"--export {given.export}: {error.strerror}: {error.filename}"
    except ArgumentError as error:
        return f"--export {given.export} contains other files: {error}"
    return ""


def about_model(model: Path) -> dict[str, Any]:
    """Return the contents of an exported model's ``model.json``.

    Raises:
        ArgumentError: The file is missing or damaged.
        OSError: The file cannot be read.
    """
    file = model / "model.json"
    if not file.is_file():
        raise ArgumentError(f"{model} is not an exported model: {file} {_NOT_A_FILE}")
    try:
        about: dict[str, Any] = json.loads(file.read_bytes())
        if about["framework"] and isinstance(about["checksums"], dict):
            return about
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ArgumentError(f"{file} is damaged, or was not written by --export")


def whole_model(model: Path) -> dict[str, Any]:
    """Return the contents of ``model.json`` after verifying the checksums of all files.

    Raises:
        ArgumentError: ``model.json`` or a file that it lists is missing or damaged.
        OSError: One of the files cannot be read.
    """
    about = about_model(model)
    for name, checksum in about["checksums"].items():
        if not (model / name).is_file():
            raise ArgumentError(f"{model / name} {_NOT_A_FILE}")
        if file_crc32(model / name) != checksum:
            raise ArgumentError(f"{model / name} is damaged: its checksum does not match")
    return about


def text_file(name: str | None) -> AbstractContextManager[TextIO]:
    """Open a text file for writing. It appears under its name only when it is complete.

    Args:
        name: Path of the file. Pipes and devices are opened directly. If None, the text is discarded.
    """
    path = Path(os.path.realpath(name or os.devnull))
    if path.exists() and not path.is_file():
        return open(str(path), "w", encoding="utf-8", errors="surrogateescape")
    return whole_text(path)


def scores_of(found: dict[str, float]) -> str:
    """Format the result of ``BinaryScores``. Includes the standard error of the AUC."""
    if np.isnan(found["auc"]):
        label = 1 if found["positives"] else 0
        return f"AUC undefined (all labels are {label}), log-loss {found['logloss']:.5f}"
    return (
        f"AUC {found['auc']:.5f} +/- {found['auc_error']:.5f}, log-loss {found['logloss']:.5f}, calibration "
        f"{found['calibration']:.4f}"
    )
