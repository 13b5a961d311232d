"""Locate the threads of this process in the user's code."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Collection
from types import FrameType
from typing import Any

from ringdance.core.reports.activity import activity, cpu_seconds

__all__ = ["all_stacks", "thread_locations", "user_frames"]

_OWN = ("ringdance", "horovod")
_PYTHONS = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_MOST_FRAMES = 8
_MOST_THREADS = 4
_SAMPLE_S = 0.02
# What a thread does, by the modules that it is in.
_BY_MODULE = (
    ("torch.cuda", "waits for the GPU"),
    ("torch._inductor", "compiles"),
    ("torch._dynamo.convert_frame", "compiles"),
    ("jax._src.compiler", "compiles"),
    ("torch.serialization", "saves or loads a model"),
    ("keras.src.saving", "saves or loads a model"),
    ("tensorflow.python.saved_model", "saves or loads a model"),
    ("torch.utils.data.dataloader", "waits for its data loader"),
)


def thread_locations(pending: Collection[int | None] = ()) -> list[dict[str, Any]]:
    """List where the main thread and others are in the user's code.

    Args:
        pending: identifiers of the threads that have submitted, or wait for, a pending request.

    Returns:
        For each thread ``name``, ``pending``, ``frames`` as from ``user_frames``, and ``doing``: a clause, or
        "" if it is pending or nothing is known; threads with pending requests first, others than the main
        thread only where they run the user's code; at most 4.
    """
    threads = {thread.ident: thread for thread in threading.enumerate() if thread.native_id}
    pid, began = os.getpid(), time.monotonic()
    before = {ident: cpu_seconds(pid, thread.native_id or 0) for ident, thread in threads.items()}
    if not set(threads).issubset(pending):
        time.sleep(_SAMPLE_S)
    frames = sys._current_frames()
    main = threading.main_thread().ident or 0
    names = {ident: f"thread '{thread.name}'" for ident, thread in threads.items()}
    names[main] = "main thread"
    found = []
    for ident in sorted(frames, key=lambda ident: (ident not in pending, ident != main)):
        listed = user_frames(frames[ident], outermost=ident == main)
        if listed and ident in names:
            doing = ""
            if ident not in pending:
                native = threads[ident].native_id or 0
                doing = _doing(frames[ident]) or activity(pid, native, (began, before[ident]))
            thread = {"name": names[ident], "pending": ident in pending, "frames": listed, "doing": doing}
            found.append(thread)
    return found[:_MOST_THREADS]


def _doing(frame: FrameType | None) -> str:
    """Return what a thread does according to the library that it is in; "" if that is not known."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for prefix, doing in _BY_MODULE:
            if module == prefix or module.startswith(prefix + "."):
                return doing
        frame = frame.f_back
    return ""


def all_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame last. Reads no source files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread '{names.get(ident, ident)}':")
        lines += [f'  File "{f.f_code.co_filename}", line {n}, in {f.f_code.co_name}'
                  for f, n in reversed(list(traceback.walk_stack(frame)))]  # fmt: skip
    return "\n".join([*lines, ""])


def user_frames(frame: FrameType | None, outermost: bool = True) -> list[str]:
    """List file, line and function of the user's frames, innermost first, at most 8.

    The user's own line is more useful than that of a library which it calls.

    Args:
        frame: the innermost frame of a thread.
        outermost: whether to name another frame, the script's if there is one, where none is the user's.
    """
    found: list[str] = []
    inner = script = frame
    while frame is not None and len(found) < _MOST_FRAMES:
        if _is_users(frame):
            found.append(_location(frame))
        if frame.f_globals.get("__name__") == "__main__":
            script = frame
        frame = frame.f_back
    if not found and outermost:
        shown = script or inner
        return [_location(shown)] if shown is not None else ["unknown location"]
    return found


def _location(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(frame: FrameType) -> bool:
    """Whether this is neither our code nor an installed package's nor Python's own."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = frame.f_code.co_filename
    return package not in _OWN and not (path.startswith(_PYTHONS) or _INSTALLED.search(path))
