"""Locate this process's threads in the user's code, and describe what they are doing."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

from ringdance.core.reports.procfs import activity, sample_cpu

_OWN = ("ringdance", "horovod")
_PYTHONS = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_MOST_FRAMES = 8
_MOST_THREADS = 4
_SAMPLE_S = 0.02
_LOADS = "waits for its data loader"
# Parts of library paths, and what a thread in such a file is doing.
_BY_FILE = (
    ("/torch/cuda/", "waits for the GPU"),
    ("/torch/_inductor/", "compiles"),
    ("/torch/_dynamo/convert_frame.py", "compiles"),
    ("/jax/_src/compiler.py", "compiles"),
    ("/torch/serialization.py", "saves or loads a model"),
    ("/keras/src/saving/", "saves or loads a model"),
    ("/tensorflow/python/saved_model/", "saves or loads a model"),
    ("/torch/utils/data/dataloader.py", _LOADS),
    ("/tensorflow/python/data/ops/iterator_ops.py", _LOADS),
    ("/ringdance/data/", _LOADS),
)


def callers_of(frame: object) -> list[FrameType]:
    """Return a frame and its callers, innermost first.

    If the frame's thread is running, Python 3.11 may return a dictionary or a function as a caller.
    """
    frames = []
    while isinstance(frame, FrameType):
        frames.append(frame)
        frame = frame.f_back
    return frames


def thread_locations(pending: Collection[int | None] = ()) -> list[dict[str, Any]]:
    """List the locations of the main thread and other threads in the user's code.

    Args:
        pending: Identifiers of the threads that have submitted, or are waiting for, a pending request.

    Returns:
        For each thread, ``name``, ``pending``, ``frames`` from ``user_frames``, and ``doing``: a clause, or
        "" if the thread is pending or nothing is known. Threads with pending requests come first. Threads
        other than the main thread are listed only if they run the user's code. At most 4 threads are listed.
    """
    threads = {thread.ident: thread for thread in threading.enumerate() if thread.native_id}
    pid = os.getpid()
    before = {ident: sample_cpu(pid, thread.native_id or 0) for ident, thread in threads.items()}
    if not set(threads).issubset(pending):
        time.sleep(_SAMPLE_S)
    stacks = {ident: callers_of(frame) for ident, frame in sys._current_frames().items()}
    main = threading.main_thread().ident or 0
    locations = []
    for ident in sorted(stacks, key=lambda ident: (ident not in pending, ident != main)):
        listed, doing, waits = user_frames(stacks[ident], outermost=ident == main), "", ident in pending
        if listed and ident in threads:
            name = "main thread" if ident == main else f"thread '{threads[ident].name}'"
            if not waits:
                doing = _doing(stacks[ident], activity(pid, threads[ident].native_id or 0, before[ident]))
            locations.append({"name": name, "pending": waits, "frames": listed, "doing": doing})
    return locations[:_MOST_THREADS]


def _doing(frames: Sequence[FrameType], said: str) -> str:
    """Return what a thread is doing according to the library that it is in, or ``said`` if unknown."""
    inside = itertools.takewhile(lambda frame: not _is_users(frame), frames)
    return doing_in([frame.f_code.co_filename for frame in inside], said)


def doing_in(files: Sequence[str], said: str) -> str:
    """Return what a thread is doing, according to its library files (innermost first), or ``said``."""
    known = [doing for file in files for part, doing in _BY_FILE if part in file]
    # A loader without workers runs in this thread, so ``said`` describes what the loader is doing.
    loads = known[:1] == [_LOADS] and said and not said.startswith("waits")
    return said if not known or loads or said.startswith("waits for data") else known[0]


def all_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame last. Reads no source files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread '{names.get(ident, ident)}':")
        lines += [f'  File "{f.f_code.co_filename}", line {f.f_lineno}, in {f.f_code.co_name}'
                  for f in reversed(callers_of(frame))]  # fmt: skip
    return "\n".join([*lines, ""])


def user_frames(frames: list[FrameType], outermost: bool = True) -> list[str]:
    """List file, line and function of the user's frames, innermost first, at most 8.

    The user's own line is more useful than the line of a library that it calls.

    Args:
        frames: Frames of a thread, innermost first.
        outermost: If True and no frame is in the user's code, return another frame, if possible the script's.
    """
    script = [frame for frame in frames if frame.f_globals.get("__name__") == "__main__"][-1:] or frames[:1]
    shown = list(filter(_is_users, frames)) or (script if outermost else [])
    return list(map(_location, shown[:_MOST_FRAMES]))


def place_of(frames: Sequence[str], others: Collection[str] = ()) -> str:
    """Return where a thread is: its line, and the line that it was called from.

    Args:
        frames: Frames of the thread, innermost first.
        others: Frames of another rank. The first caller that is not among them is named.
    """
    inner, *outer = frames
    return ", called from ".join([inner, *[*(frame for frame in outer if frame not in others), *outer][:1]])


def _location(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(frame: FrameType) -> bool:
    """Return True for code that is not part of this package, an installed package or Python itself."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = frame.f_code.co_filename
    return package not in _OWN and not (path.startswith(_PYTHONS) or _INSTALLED.search(path))
