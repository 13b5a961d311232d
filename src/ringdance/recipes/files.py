"""Exported models and texts, written whole or not at all; what is read of them is checked."""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

import ringdance.numpy as hvd
from ringdance.data.files import file_crc32, why_not
from ringdance.errors import ArgumentError
from ringdance.job_files import unique_beside, whole_text
from ringdance.launch.parser import Parser


def export(
    given: argparse.Namespace, write: Callable[[Path], None], about: dict[str, Any],
    table: hvd.EmbeddingTable | None,
) -> None:
    """Write a model for score.py: a directory that is complete when it has its name; collective.

    Args:
        given: options of the recipe: ``export`` and ``checkpoints``.
        write: puts the model's files into a directory; called on rank 0.
        about: goes into model.json.
        table: written beside it.

    Raises:
        SystemExit: it could not be written; on all ranks.
    """
    final = Path(given.export).resolve()
    partial, old = unique_beside(final, "partial"), unique_beside(final, "old")
    failure: Exception | None = None
    try:
        if hvd.rank() == 0:
            for left in final.parent.glob(f".{glob.escape(final.name)}.partial-{os.uname().nodename}-*"):
                if not os.path.exists(f"/proc/{left.name.rpartition('-')[2]}"):  # its process was killed
                    shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    except OSError as error:
        failure = error
    try:
        if table is not None:
            table.save(partial / "table.npy")  # without a directory it fails on all ranks
    except OSError as error:
        failure = failure or error
    problem = ""
    # What only one rank does takes seconds here. Marked, the waiting ranks do not warn.
    with hvd.pause_stall_check("export"):
        if hvd.rank() == 0:
            try:
                if failure:
                    raise failure
                write(partial)
                about = about | {"files": [one.name for one in partial.iterdir()]}
                about["checksums"] = {name: file_crc32(one) for name, one in _files(partial).items()}
                (partial / "model.json").write_text(json.dumps(about, indent=1))
            except Exception as error:  # of any framework
                problem = f"--export {given.export}: {why_not(error, final.parent)}"
                shutil.rmtree(partial, ignore_errors=True)
            else:
                problem = wrong_target(given) or _renamed(partial, final, old)
                problem += f". The model is in {partial}" if problem else ""
        problem = hvd.broadcast_object(problem)
    if problem:
        raise SystemExit(problem)


def _files(directory: Path) -> dict[str, Path]:
    """Return the files below a directory, by their names in it.

    Raises:
        ArgumentError: one of them is a FIFO, for one, which would be waited for.
    """
    every = {str(one.relative_to(directory)): one for one in directory.rglob("*") if one.exists()}
    for one in every.values():
        if not (one.is_file() or one.is_dir()):
            raise ArgumentError(f"{one} is no regular file")
    return {name: one for name, one in every.items() if one.is_file()}


def _renamed(partial: Path, final: Path, old: Path) -> str:
    """Give a directory its name instead of that which has it; return the problem, or ""."""
    try:
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.replace(final, old)
        os.replace(partial, final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        return f"--export {final}: {error.strerror}"
    return ""


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
            there -= {"model.json", *about_model(target, "files")["files"]}
        if there:
            return f"--export {given.export}: there is something else, such as {min(there)}"
        if os.path.ismount(target):
            return f"--export {given.export}: a file system is mounted there: name a directory in it"
        if not os.access(target.parent, os.W_OK):
            return f"--export {given.export}: {target.parent} cannot be written"
    except OSError as error:
        return f"--export {given.export}: {error.strerror}: {error.filename}"
    except (ArgumentError, TypeError) as error:
        return f"--export {given.export}: there is something else: {error}"
    return ""


def about_model(model: Path, *needed: str) -> dict[str, Any]:
    """Return what ``model.json`` says of an exported model.

    Raises:
        ArgumentError: it is not there, damaged, or does not have what is needed.
    """
    file = model / "model.json"
    if os.path.exists(file) and not os.path.isfile(file):  # a FIFO would be waited for
        raise ArgumentError(f"{file} is no regular file")
    try:
        about: dict[str, Any] = json.loads(file.read_text())
        missing = [name for name in needed if name not in about]
    except OSError as error:
        raise ArgumentError(f"{model} is no exported model: {error.strerror}: {error.filename}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{file} is damaged: {error}") from None
    if missing:
        raise ArgumentError(f"{model} is a model of another recipe: {file} has no {missing[0]}")
    return about


def whole_model(model: Path, *needed: str) -> dict[str, Any]:
    """Return the same, after all files of the model were read.

    Raises:
        ArgumentError: the same, or one of them is damaged.
    """
    about = about_model(model, *needed)
    checksums, there = about.get("checksums", {}), _files(model)  # a version before wrote none
    for name in there.keys() & checksums:
        if file_crc32(there[name]) != checksums[name]:
            raise ArgumentError(f"{there[name]} is damaged: its checksum is another one")
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


def run_scoring(
    manual: str, data: str, batch_size: int, score: Callable[[argparse.Namespace, dict[str, Any]], int],
    *needed: str,
) -> None:
    """Be a script that scores data with an exported model, as one process.

    Args:
        manual: Of the script.
        data: What DATA may be, for the help.
        batch_size: The default.
        score: Scores, given the command line and ``model.json``; returns how many samples were left out.
        needed: What ``model.json`` must have.

    Raises:
        SystemExit: 2: something is wrong; 3: samples were left out.
    """
    parser = Parser(description=manual)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a directory that --export has written")
    add("data", type=Path, metavar="DATA", help=data)
    add("--split", default="train", help="of prepared data; default: train")
    add("--output", metavar="FILE", help="default: the figures alone")
    add("--batch-size", type=int, default=batch_size, metavar="N", help=f"default: {batch_size}")
    given = parser.parse_args()
    try:
        alone()
        left_out = score(given, whole_model(given.model, *needed))
    except (ArgumentError, OSError) as error:
        parser.error(str(error))
    if left_out:
        sys.exit(3)


def alone() -> None:
    """Start as one process: scripts that score have no work for more.

    Raises:
        ArgumentError: there are more.
    """
    hvd.init()
    if hvd.size() > 1:
        raise ArgumentError(f"{sys.argv[0]} runs as one process: start it without `ringdance run`")
