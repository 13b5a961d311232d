"""Locate the threads of this process in the user's code."""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import os
import re
import sys
import threading
import time
import traceback
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
_WRITE = ("flush", "fsync", "fdatasync", "pwrite", "write", "writelines")  # functions that do
_LOADS = "waits for its data loader"
# What a thread does, by the files of libraries that it is in.
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


def thread_locations(pending: Collection[int | None] = ()) -> list[dict[str, Any]]:
    """List where the main thread and others are in the user's code.

    Args:
        pending: identifiers of the threads that have submitted, or wait for, a pending request.

    Returns:
        For each thread, and each task of asyncio if a thread waits in its event loop, ``name``, ``pending``,
        ``frames`` as from ``user_frames``, and ``doing``: a clause, or "" if it is pending or nothing is
        known; threads with pending requests first, others than the main thread only where they run the
        user's code; at most 4.
    """
    threads = {thread.ident: thread for thread in threading.enumerate() if thread.native_id}
    pid = os.getpid()
    before = {ident: sample_cpu(pid, thread.native_id or 0) for ident, thread in threads.items()}
    if not set(threads).issubset(pending):
        time.sleep(_SAMPLE_S)
    frames = sys._current_frames()
    main = threading.main_thread().ident or 0
    found = []
    for ident in sorted(frames, key=lambda ident: (ident not in pending, ident != main)):
        listed, doing, waits = user_frames(frames[ident], outermost=ident == main), "", ident in pending
        if listed and ident in threads:
            name = "main thread" if ident == main else f"thread '{threads[ident].name}'"
            tasks: list[tuple[str, list[str]]] = []
            with contextlib.suppress(Exception):  # of the user's objects, for one: it must end no job
                tasks = _tasks(frames[ident])
                if tasks:
                    doing, listed = "awaits", tasks.pop(0)[1] + listed
                elif not waits:
                    doing = _doing(frames[ident], activity(pid, threads[ident].native_id or 0, before[ident]))
            found.append({"name": name, "pending": waits, "frames": listed, "doing": doing})
            found += [{"name": n, "pending": False, "frames": f, "doing": "awaits"} for n, f in tasks]
    return found[:_MOST_THREADS]


def _tasks(inner: FrameType) -> list[tuple[str, list[str]]]:
    """List the tasks of the event loop in which a thread waits, with the user's frames that await."""
    for frame, _ in traceback.walk_stack(inner):
        if _is_users(frame):
            break
        if frame.f_globals.get("__name__") in ("asyncio.base_events", "asyncio.runners"):
            import asyncio  # takes long where the user does not need it

            runner = frame.f_locals.get("self")
            loop = getattr(runner, "_loop", runner)
            known = asyncio.all_tasks(loop) if isinstance(loop, asyncio.AbstractEventLoop) else ()
            tasks = sorted(known, key=lambda task: (len(task.get_name()), task.get_name()))
            found = [(f"task '{task.get_name()}'", _awaiting(task.get_coro())) for task in tasks]
            return [(name, frames) for name, frames in found if frames]
    return []


def _awaiting(coroutine: Any) -> list[str]:
    """List the user's frames of a coroutine and those that it awaits, innermost first."""
    found: list[str] = []
    while frame := getattr(coroutine, "cr_frame", None):
        found[:0] = [_location(frame)] if _is_users(frame) else []
        coroutine = coroutine.cr_await
    return found


def _doing(inner: FrameType, said: str) -> str:
    """Return what a thread does, by the C function and the library that it is in, or as ``said``."""
    owner, name = _called(inner)
    if owner.startswith("mpi4py"):  # it polls: by its CPU time it computes
        return f"waits in MPI's {name}()"
    if name in _WRITE and said.startswith(("computes", "waits in")):  # between two waits for its disk
        return "writes a file" + said.removeprefix("computes").removeprefix("waits")
    inside = itertools.takewhile(lambda one: not _is_users(one[0]), traceback.walk_stack(inner))
    return doing_in([frame.f_code.co_filename for frame, _ in inside], said)


def doing_in(files: Sequence[str], said: str) -> str:
    """Return what a thread does, by the libraries' files that it is in, innermost first, or as ``said``."""
    known = [doing for file in files for part, doing in _BY_FILE if part in file]
    # That it waits for another process says more, and a loader without workers is the thread itself.
    loads = known[:1] == [_LOADS] and said and not said.startswith("waits")
    return said if not known or loads or said.startswith("waits for data") else known[0]


def _called(frame: FrameType) -> tuple[str, str]:
    """Return the C function that a frame is in: the module of the object it is of, and its name."""
    chains: dict[object, list[str]] = {}  # the names of each expression, by where it begins
    start: object = None
    for one in dis.get_instructions(frame.f_code):
        start = one.positions and (one.positions.lineno, one.positions.col_offset)
        if one.offset == frame.f_lasti:
            break
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains.setdefault(start, []).append(one.argval)
        elif one.opname.startswith("LOAD_") and isinstance(one.argval, str):
            chains[start] = [one.argval]
    first, *names = chains.get(start, [""])
    owner = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in names[:-1]:
        owner = inspect.getattr_static(owner, name, None)  # runs no code of the user's
    kind = owner if issubclass(type(owner), type) else type(owner)  # isinstance() would ask the object
    return str(type.__getattribute__(kind, "__module__")), [first, *names][-1]


def all_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame last. Reads no source files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread '{names.get(ident, ident)}':")
        lines += [f'  File "{f.f_code.co_filename}", line {n}, in {f.f_code.co_name}'
                  for f, n in reversed(list(traceback.walk_stack(frame)))]  # fmt: skip
    return "\n".join([*lines, ""])


def user_frames(innermost: FrameType, outermost: bool = True) -> list[str]:
    """List file, line and function of the user's frames, innermost first, at most 8.

    The user's own line is more useful than that of a library which it calls.

    Args:
        innermost: frame of a thread.
        outermost: whether to name another frame, the script's if there is one, where none is the user's.
    """
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    script = [frame for frame in frames if frame.f_globals.get("__name__") == "__main__"][-1:] or frames[:1]
    shown = list(filter(_is_users, frames)) or (script if outermost else [])
    return list(map(_location, shown[:_MOST_FRAMES]))


def place_of(frames: Sequence[str], others: Collection[str] = ()) -> str:
    """Return where a thread is: its line, and the one that it was called from.

    Args:
        frames: innermost first.
        others: of another rank; of the callers the first that is not among them is named.
    """
    inner, *outer = frames
    return ", called from ".join([inner, *[*(frame for frame in outer if frame not in others), *outer][:1]])


def _location(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_users(frame: FrameType) -> bool:
    """Whether this is neither our code nor an installed package's nor Python's own."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = frame.f_code.co_filename
    return package not in _OWN and not (path.startswith(_PYTHONS) or _INSTALLED.search(path))
