"""Sample the metrics of a host's ranks: counters from their rings' headers, and CPU, memory and GPU use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil

from ringdance.core.monitor.core_use import CoreUse
from ringdance.core.reports.procfs import task_ids
from ringdance.core.ring import RingReader, Word, counters
from ringdance.host.limits import words_of

Row = dict[str, Any]

_FRESH_S = 0.5  # minimum interval over which CPU use can be measured accurately


class Sampler:
    """Takes samples of the metrics. Several threads may use it at the same time.

    Args:
        readers: Readers for the rings of this host's ranks, ordered by local rank.
    """

    def __init__(self, readers: Sequence[RingReader]) -> None:
        pids = [reader.who.pid for reader in readers]
        self._ranks = {pid: (reader, ProcessUse(pid)) for pid, reader in zip(pids, readers, strict=True)}
        self._gpus = _Gpus(pids)
        self._lock = threading.Lock()
        self._shared: Row = {}
        self._used: dict[int, Row] = {}
        self._taken = time.monotonic()
        self._use = CoreUse(pids)

    def rows(self) -> list[Row]:
        """Return a row for each rank that has not left the job."""
        with self._lock:
            if time.monotonic() - self._taken > _FRESH_S or not self._shared:
                cpu, memory = round(100 * self._use.share(), 1), psutil.virtual_memory().percent
                self._shared = {"host_cpu_percent": cpu, "host_memory_percent": memory}
                self._shared["host_cores"] = self._use.cores
                self._used = self._gpus.sample()
                self._taken = time.monotonic()
            rows = []
            for pid, (reader, process) in self._ranks.items():
                words, who = reader.words, reader.who
                row = {"time": round(time.time(), 3), **who._asdict(), "size": words[Word.SIZE]}
                if words[Word.STEPS]:
                    row["last_step_time"] = round((words[Word.LAST_STEP] + words[Word.EPOCH_OFFSET]) / 1e9, 3)
                rows.append(row | counters(words) | process.sample() | self._shared | self._used.get(pid, {}))
            return rows

    def leave(self, pids: Iterable[int]) -> None:
        """Exclude these processes from later samples."""
        with self._lock:
            for pid in pids:
                self._ranks.pop(pid, None)


class ProcessUse:
    """CPU time and memory of a rank's process. CPU time includes child processes, which may decode input."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: Row = {"cpu_seconds": 0.0, "rss_bytes": 0}
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)
        self.sample()

    def sample(self) -> Row:
        """Return CPU time and memory, or the last known values if the process has ended."""
        with contextlib.suppress(psutil.Error, AttributeError):
            seconds = sum(self._process.cpu_times()[:4])
            rss = self._process.memory_info().rss
            for child in _descendants(self._pid):
                with contextlib.suppress(psutil.Error):
                    seconds += sum(psutil.Process(child).cpu_times()[:4])
            # The CPU time of a child that has exited is missing until its parent has reaped the child.
            seconds = max(round(seconds, 2), self._last["cpu_seconds"])
            self._last = {"cpu_seconds": seconds, "rss_bytes": rss or self._last["rss_bytes"]}
        return self._last


def _descendants(pid: int) -> Iterator[int]:
    """Yield the pids of a process's descendants, if the kernel lists children."""
    for task in task_ids(pid):
        for child in map(int, words_of(f"/proc/{pid}/task/{task}/children")):
            if child != os.getpid():  # skip the monitor, which is also a child of a rank
                yield child
                yield from _descendants(child)


class _Gpus:
    """Reads the use of the ranks' GPUs from NVML. Returns nothing if NVML is unavailable.

    Args:
        pids: Process ids of the ranks.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._nvml: Any = None
        self._devices: list[Any] = []
        with contextlib.suppress(Exception):  # pynvml is not installed, or NVML is unavailable
            import pynvml as nvml

            nvml.nvmlInit()
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            self._nvml = nvml

    def sample(self) -> dict[int, Row]:
        """Return GPU use and GPU memory by process, or an empty dictionary without GPUs."""
        rows: dict[int, Row] = {}
        if not self._devices:
            return rows
        with contextlib.suppress(self._nvml.NVMLError):
            used = [self._read(device) for device in self._devices]
            for number, pid in enumerate(self._pids):
                own = [device for device in used if pid in device[2]]
                # In a container, NVML may show no processes or different ids. Assume the local rank's GPU.
                own = own or [used[number % len(used)]]
                rows[pid] = {
                    "gpu_percent": sum(percent for percent, _, _ in own) / len(own),
                    "gpu_memory_bytes": sum(pids.get(pid) or memory for _, memory, pids in own),
                }
        return rows

    def _read(self, device: Any) -> tuple[int, int, dict[int, int | None]]:
        """Return a GPU's use in percent, its used memory in bytes, and the memory used by each process."""
        nvml = self._nvml
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        return (
            nvml.nvmlDeviceGetUtilizationRates(device).gpu,
            nvml.nvmlDeviceGetMemoryInfo(device).used,
            {process.pid: process.usedGpuMemory for process in processes},
        )
