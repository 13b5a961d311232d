"""Limits that the system sets for this process: open files and cores.

Standard library only, because agents import it.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator

_ROOT = ""  # prefix of /proc and /sys


def raise_open_files(wanted: int) -> int:
    """Raise the soft limit on open files to ``wanted`` if the hard limit allows it. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def words_of(path: str) -> list[str]:
    """Return the words of a file in /proc or /sys, or an empty list if the file cannot be read."""
    try:
        with open(f"{_ROOT}{path}", encoding="utf-8", errors="replace") as file:
            return file.read().split()
    except OSError:
        return []


def cgroups(controller: str) -> Iterator[str]:
    """Yield the directories of this process's cgroup and its parents for a controller (v1 and v2)."""
    for line in words_of("/proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            bases = [f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            yield from (os.path.join(base, *parts[:depth]) for depth in range(len(parts) + 1))


def affinity(pid: int = 0) -> set[int]:
    """Return the cores that a process may run on. If they are unknown, return this process's cores."""
    try:
        return os.sched_getaffinity(pid)
    except AttributeError:  # not Linux
        return set(range(os.cpu_count() or 1))
    except OSError:
        return os.sched_getaffinity(0)


def quota() -> tuple[float, str]:
    """Return the lowest CPU quota of this process's cgroups, in cores, and the directory that sets it."""
    quotas = [(float("inf"), "")]
    for directory in cgroups("cpu"):
        words = words_of(f"{directory}/cpu.max") or [
            *words_of(f"{directory}/cpu.cfs_quota_us"), *words_of(f"{directory}/cpu.cfs_period_us")
        ]  # fmt: skip
        if len(words) == 2 and words[0].isdecimal() and int(words[0]) > 0:  # rules out "max" and -1
            quotas.append((int(words[0]) / int(words[1]), directory))
    return min(quotas)


def usable_cores(pids: Iterable[int] = ()) -> int:
    """Return how many cores this process may use, given its affinity mask and its cgroups' CPU quota.

    Args:
        pids: Processes with the same quota. If any are given, count the cores that at least one of them may
            use, instead of this process's cores.
    """
    return max(1, int(min(len(set[int]().union(*map(affinity, pids)) or affinity()), quota()[0])))


def shared_cores(pids: Iterable[int]) -> int:
    """Return this process's share of the cores that it may use. The result may be 0.

    Args:
        pids: Computing processes with the same quota, including this one. Each core is divided equally among
            the processes that may run on it.
    """
    masks = [affinity(pid) for pid in pids] or [affinity()]
    own = sum(1 / max(1, sum(core in mask for mask in masks)) for core in affinity())
    return int(min(own, quota()[0] / len(masks)) + 1e-6)
