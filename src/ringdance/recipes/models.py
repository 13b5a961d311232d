"""Exported models, written whole or not at all and checked when they are read; texts for scores."""

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
from ringdance.errors import ArgumentError, LaunchError
from ringdance.host.files import NO_FORMAT, check_regular, read_regular, whole_text


def export(
    given: argparse.Namespace, write: Callable[[Path], None], about: dict[str, Any],
    table: hvd.EmbeddingTable | None,
) -> None:
    """Write a model for score.py: a directory that is complete when it has its name; collective.

    Args:
        given: options of the recipe: ``export``.
        write: puts the model's files into a directory; called on rank 0.
        about: goes into model.json.
        table: Written next to it.

    Raises:
        SystemExit: it could not be written; on all ranks.
    """
    final = Path(given.export).resolve()
    partial, old = (final.with_name(f".{final.name}.{word}") for word in ("partial", "old"))

    def begin() -> None:
        if old.exists() and not final.exists():  # a process was killed between two names
            os.replace(old, final)
        for left in partial, old:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete() -> str:
        try:
            write(partial)
            files = sorted(one for one in partial.rglob("*") if one.is_file())
            checksums = {str(one.relative_to(partial)): file_crc32(one) for one in files}
            (partial / "model.json").write_text(json.dumps(about | {"checksums": checksums}, indent=1))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        problem = wrong_target(given)  # others may have written there while it was trained
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
    """Do something on rank 0; if that fails, or it returns a problem, end all ranks."""
    problem = ""
    # What only one rank does takes seconds here. Marked, the waiting ranks do not warn.
    with hvd.pause_stall_check("export"):
        if hvd.rank() == 0:
            try:
                problem = action() or ""
            except Exception as error:  # of any framework
                problem = _not_written(name, error)
        problem = hvd.broadcast_object(problem)
    if problem:
        raise SystemExit(problem)


def _not_written(name: str, error: Exception) -> str:
    return f"--export {name}: {why_not(error, Path(name).resolve().parent)}"


def wrong_target(given: argparse.Namespace) -> str:
    """Return why ``--export`` cannot write there: before the training, and nothing of others is replaced."""
    if not given.export:
        return ""
    target = Path(given.export).resolve()
    if given.checkpoints and target in (kept := Path(given.checkpoints).resolve(), *kept.parents):
        return f"--export {given.export}: --checkpoints {given.checkpoints} is there: give another directory"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        there = {one.name for one in target.iterdir()} if target.exists() else set()
        if "model.json" in there:
            own = (name.partition("/")[0] for name in about_model(target)["checksums"])
            there -= {"model.json", *own}
        if there:
            return f"--export {given.export}: there is something else, such as {min(there)}"
        if os.path.ismount(target):
            return f"--export {given.export}: a file system is mounted there: name a directory in it"
        if not os.access(target.parent, os.W_OK):
            return f"--export {given.export}: {target.parent} cannot be written"
    except OSError as error:
        return f"--export {given.export}: {error.strerror}: {error.filename}"
    except ArgumentError as error:
        return f"--export {given.export}: there is something else: {error}"
    return ""


def about_model(model: Path) -> dict[str, Any]:
    """Return what ``model.json`` says of an exported model.

    Raises:
        ArgumentError: it is not there, or damaged.
    """
    file = model / "model.json"
    try:
        about: dict[str, Any] = json.loads(read_regular(file))
        if about["framework"] and isinstance(about["checksums"], dict):
            return about
    except LaunchError as error:
        raise ArgumentError(f"{model} is not an exported model: {error}") from None
    except NO_FORMAT:
        pass
    raise ArgumentError(f"{file} is damaged, or not of an exported model")


def whole_model(model: Path) -> dict[str, Any]:
    """Return the same, after all files of the model were read.

    Raises:
        ArgumentError: the same, or one of them is missing or damaged.
    """
    about = about_model(model)
    for name, checksum in about["checksums"].items():
        try:
            check_regular(model / name)
            found = file_crc32(model / name)
        except (LaunchError, OSError) as error:
            raise ArgumentError(f"{model / name}: {getattr(error, 'strerror', None) or error}") from None
        if found != checksum:
            raise ArgumentError(f"{model / name} is damaged: its checksum is another one")
    return about


def text_file(name: str | None) -> AbstractContextManager[TextIO]:
    """Open a file for a text; it has its name when it is complete.

    Args:
        name: of the file; a pipe or a device is written directly. None: the text is thrown away.
    """
    path = Path(os.path.realpath(name or os.devnull))
    if path.exists() and not path.is_file():
        return open(str(path), "w", encoding="utf-8", errors="surrogateescape")
    return whole_text(path)


def scores_of(found: dict[str, float]) -> str:
    """Return the figures of ``BinaryScores``, the AUC with its standard error."""
    rows = f"{found['count']:,} rows"
    if np.isnan(found["auc"]):
        kind = "is 1" if found["positives"] else "is 0"
        return f"log-loss {found['logloss']:.5f} of {rows}; no AUC, as each label {kind}"
    return (
        f"AUC {found['auc']:.5f} +/- {found['auc_error']:.5f}, log-loss {found['logloss']:.5f}, calibration "
        f"{found['calibration']:.4f} of {rows}"
    )
