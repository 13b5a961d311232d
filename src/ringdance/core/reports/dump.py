"""Read the stacks of another process on this host, even while a call in C holds the GIL.

Each rank makes ``faulthandler`` write its stacks to memory when it receives a real-time signal. That works in
a signal handler, without the GIL. mpiexec forwards SIGUSR1 and SIGUSR2, so neither of them is used.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path

from ringdance.core.reports.procfs import thread_state
from ringdance.core.ring import memories
from ringdance.host.system import linux

_NAME = "ringdance-stacks"
_SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 12
_WRITE_S = 0.3
_OWN = re.compile(f"{re.escape(str(Path(__file__).parents[2]))}/|/(site|dist)-packages/|/lib/python3|<frozen")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_memory = -1


def enable() -> None:
    """Let other processes of this user request this process's stacks. Linux only; does nothing elsewhere."""
    global _memory
    if _memory < 0 and hasattr(os, "memfd_create"):
        _memory = os.memfd_create(_NAME)
        os.write(_memory, f"{threading.main_thread().ident or 0:x}\n".encode())
        faulthandler.register(_SIGNAL, file=_memory, all_threads=True)


def stacks_of(pid: int) -> str:
    """Return the stacks of all threads of a process on this host, or "" if they are unknown.

    The first line contains the main thread's identifier. A stopped process writes nothing.
    """
    path = next(memories(pid, _NAME), "")
    if not path or not _handles(pid):
        return ""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        main = file.readline()
        begin = file.seek(0, os.SEEK_END)
        if thread_state(pid)[1] in ("T", "t"):
            return ""
        os.kill(pid, _SIGNAL)
        text, until = b"", time.monotonic() + _WRITE_S
        while time.monotonic() < until:
            time.sleep(0.02)
            file.seek(begin)
            before, text = text, file.read()
            if text and text == before:
                break
        return (b"Main thread: 0x" + main + text).decode(errors="replace") if text else ""
    return ""


def own_lines(frames: list[str]) -> list[str]:
    """Return the frames in the user's code, or all frames if there are none."""
    return [frame for frame in frames if not _OWN.search(frame)] or frames


def worker_lines(frames: list[str]) -> list[str]:
    """Return the user's frames in the function that a forked process runs, or [] if it was not forked."""
    inside = list(itertools.takewhile(lambda frame: not frame.endswith(" in _bootstrap"), frames))
    return [frame for frame in inside if not _OWN.search(frame)] if len(inside) < len(frames) else []


def main_frames(text: str) -> list[str]:
    """Return the main thread's frames from ``stacks_of``'s result, innermost first, or [] if unknown.

    A frame reads ``file:line in function``.
    """
    main, *blocks = re.split(r"thread:? 0x0*", text, flags=re.IGNORECASE)[1:] or [""]
    known = [block for block in blocks if re.match(rf"{main.strip()}\b", block)]
    # A child that was forked by a thread other than the main thread contains only a copy of that thread.
    known = known or (blocks if len(blocks) == 1 else [""])
    frames = _FRAME.findall(known[0])
    return [f"{file}:{line} in {name}" for file, line, name in frames]


def _handles(pid: int) -> bool:
    """Return True if a process has a handler for ``_SIGNAL``. Without one, the signal would kill it."""
    caught = re.search(r"^SigCgt:\s*(\w+)", linux.text(f"/proc/{pid}/status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)
