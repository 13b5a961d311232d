"""Describe another process of this host from /proc. Linux only; elsewhere nothing is known."""

from __future__ import annotations

import contextlib
import os
import time

from ringdance.core.reports.activity import activity

__all__ = ["CpuSample", "describe_threads", "sample_cpu"]

_COMPUTES = 0.5  # of a core
_IN_CALL = ", probably in a call that holds Python's lock"
_MOST_THREADS = 2
CpuSample = tuple[float, float]  # seconds of time.monotonic, and seconds of CPU that a thread has used


def sample_cpu(pid: int) -> CpuSample | None:
    """Read the CPU time of a process's main thread; None if that is not possible."""
    found = _read_stat(pid, pid)
    return None if found is None else (time.monotonic(), found[2])


def describe_threads(pid: int, before: CpuSample | None) -> str:
    """Describe what keeps a process from answering: its main thread, and others that run.

    Args:
        pid: of a process of this host.
        before: an earlier sample of it.

    Returns:
        A clause as "its main thread waits for a lock (state S, futex_do_wait)"; "" if nothing is known.
    """
    found = _read_stat(pid, pid)
    if found is None:
        return ""
    _, letter, used = found
    share = float(letter == "R")
    if before is not None and time.monotonic() - before[0] > 0.1:
        share = (used - before[1]) / (time.monotonic() - before[0])
    where, doing = _read_wchan(pid, pid), activity(pid, pid)
    if share >= _COMPUTES:
        text = f"its main thread computes{_IN_CALL}"
    elif letter == "R":
        text = f"its main thread computes, but with {share:.0%} of a core: the cores of its host are busy"
    elif where.startswith("futex"):
        text = f"its main thread waits for a lock (state {letter}, {where})"
    elif doing:
        text = f"its main thread {doing}{'' if letter == 'D' else _IN_CALL}"
    else:
        state = f"{letter}, {where}" if where else letter
        text = f"its main thread sleeps in the kernel (state {state}){_IN_CALL}"
    others = _running_threads(pid)
    more = f" and {len(others) - _MOST_THREADS} more" if len(others) > _MOST_THREADS else ""
    return text + (f"; other threads that run: {', '.join(others[:_MOST_THREADS])}{more}" if others else "")


def _running_threads(pid: int) -> list[str]:
    """Return the names of the threads but the main one that run now."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/task"):
            stat = _read_stat(pid, int(entry))
            if stat is not None and stat[1] == "R" and int(entry) != pid:
                found.append(f"'{stat[0]}' (thread id {entry})")
    return found


def _read_stat(pid: int, tid: int) -> tuple[str, str, float] | None:
    """Return a thread's name, its state's letter and the seconds of CPU it has used."""
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
        fields = tail.split()
        ticks = int(fields[11]) + int(fields[12])  # in user and in kernel mode
        return head.partition("(")[2], fields[0], ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def _read_wchan(pid: int, tid: int) -> str:
    """Return the kernel's function in which a thread sleeps, or "" if unknown."""
    try:
        with open(f"/proc/{pid}/task/{tid}/wchan") as file:
            return file.read().strip().removeprefix("0")
    except OSError:
        return ""
