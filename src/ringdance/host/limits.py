"""What the system lets this process have: open files, cores. Standard library only, as agents import it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator

_ROOT = ""  # of /proc and /sys


def raise_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted` where the hard limit allows; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def words_of(path: str) -> list[str]:
    """Return the words of a file of /proc or /sys; none if it cannot be read."""
    try:
        with open(f"{_ROOT}{path}", encoding="utf-8", errors="replace") as file:
            return file.read().split()
    except OSError:
        return []


def cgroups(controller: str) -> Iterator[str]:
    """Yield the directories of this process's cgroup of a controller and those above it (v1 and v2)."""
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
    """Return the numbers of the cores that a process may run on; this one's if it cannot be seen."""
    try:
        return os.sched_getaffinity(pid)
    except AttributeError:  # not Linux
        return set(range(os.cpu_count() or 1))
    except OSError:
        return os.sched_getaffinity(0)


def quota() -> tuple[float, str]:
    """Return the lowest quota, in cores, of this process's cgroups, and the directory that has it."""
    quotas = [(float("inf"), "")]
    for directory in cgroups("cpu"):
        words = words_of(f"{directory}/cpu.max") or [
            *words_of(f"{directory}/cpu.cfs_quota_us"), *words_of(f"{directory}/cpu.cfs_period_us")
        ]  # fmt: skip
        if len(words) == 2 and words[0].isdecimal() and int(words[0]) > 0:  # neither "max" nor -1
            quotas.append((int(words[0]) / int(words[1]), directory))
    return min(quotas)


def usable_cores(pids: Iterable[int] = ()) -> int:
    """Return how many cores this process may use, by its affinity mask and its cgroups' CPU quota.

    Args:
        pids: Processes with the same quota, instead of this one: all cores that any of them may use.
    """
    return max(1, int(min(len(set[int]().union(*map(affinity, pids)) or affinity()), quota()[0])))


def shared_cores(pids: Iterable[int]) -> int:
    """Return this process's share of the cores that it may use, which may be 0.

    Args:
        pids: Processes with the same quota that compute, with this one. Those with the same cores in their
            affinity masks share them; a launcher that binds ranks has divided the cores already.
    """
    masks = [affinity(pid) for pid in pids] or [affinity()]
    own = sum(1 / max(1, sum(core in mask for mask in masks)) for core in affinity())
    return int(min(own, quota()[0] / len(masks)) + 1e-6)
