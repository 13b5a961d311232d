"""Measure the utilization of the cores that are available to a host's ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from ringdance.host.limits import affinity, quota, words_of


class _Times(NamedTuple):
    """Times in seconds: clock time, the cores' idle and total time, and the cgroup's CPU time."""

    clock: float
    idle: float
    total: float
    used: float


class CoreUse:
    """Measures how busy the cores available to some processes are, counting all programs on the host.

    Args:
        pids: The processes. All must share this process's quota.

    Attributes:
        cores: Number of cores in the union of the affinity masks, or the quota if it is lower.
    """

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._cores = set[int]().union(*map(affinity, pids)) or affinity()
        self._quota, self._cgroup = quota()
        self.cores = min(float(len(self._cores)), self._quota)
        self._last = self._times()

    def share(self) -> float:
        """Return the share of the cores, 0 to 1, that has been busy since the last call.

        If the processes have used up their quota, all cores count as busy.
        """
        now = self._times()
        clock, idle, total, used = (after - before for after, before in zip(now, self._last, strict=True))
        if total <= 0 or clock <= 0:
            return 0.0
        self._last = now
        free = min(len(self._cores) * idle / total, self._quota - used / clock)
        return min(1.0, max(0.0, 1 - free / self.cores))

    def _times(self) -> _Times:
        each = psutil.cpu_times(percpu=True)
        if max(self._cores) < len(each):  # otherwise, this container shows only its own cores
            each = [each[core] for core in self._cores]
        idle = sum(one.idle + getattr(one, "iowait", 0.0) for one in each)
        # On Linux, user time already includes guest time.
        total = sum(sum(one) - getattr(one, "guest", 0.0) - getattr(one, "guest_nice", 0.0) for one in each)
        return _Times(time.monotonic(), idle, total, self._used() if self._cgroup else 0.0)

    def _used(self) -> float:
        """Return the CPU time used by the cgroup that sets the quota, in seconds, or 0 if unavailable."""
        words = words_of(f"{self._cgroup}/cpu.stat")  # in cgroup v1, this file does not contain the usage
        if "usage_usec" in words:
            return int(words[words.index("usage_usec") + 1]) / 1e6
        # In cgroup v1, the cpuacct controller reports the usage. It may be mounted separately from cpu.
        other = self._cgroup.replace("/cgroup/cpu", "/cgroup/cpuacct", 1)
        words = words_of(f"{self._cgroup}/cpuacct.usage") or words_of(f"{other}/cpuacct.usage") or ["0"]
        return int(words[0]) / 1e9
