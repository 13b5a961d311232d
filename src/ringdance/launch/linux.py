"""What only Linux can do, with a fallback for other systems: dying with a parent, finding a job's processes.

Standard library only, and importable by path: guardian.py and rank.py run without ``site`` and
without the package. On other systems :func:`die_with_parent` and :func:`adopt_orphans` do
nothing and the processes are found through ``ps``.
"""

from __future__ import annotations

import os
import signal
import sys

LINUX = sys.platform.startswith("linux")
MARKER = "RINGDANCE_JOB"
"""Environment variable that every process of a job inherits; its value is the job's id."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    if not LINUX:
        return False
    import ctypes

    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def die_with_parent() -> bool:
    """Ask the kernel to SIGKILL this process when its parent ends; False where that is not possible.

    It survives ``exec``. The parent may have died before the call: compare ``os.getppid()`` after it.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Become the parent of all descendants whose own parent dies."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _table() -> dict[int, int]:
    """Parent of each living process; zombies are left out."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        # "pid (name) state ppid ...": the name may hold spaces and parentheses.
        fields = _read(f"/proc/{entry}/stat").rpartition(b")")[2].split()
        if len(fields) > 1 and fields[0] not in (b"Z", b"X"):
            parents[int(entry)] = int(fields[1])
    return parents


def _ps(job: str) -> tuple[dict[int, int], set[int]]:
    """The same from ``ps`` (macOS): parents, and the processes that carry the marker."""
    import subprocess

    done = subprocess.run(
        ["ps", "-axEwwo", "pid=,ppid=,command="], capture_output=True, text=True, check=False
    )
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for line in done.stdout.splitlines():
        words = line.split(None, 2)
        if len(words) == 3:
            parents[int(words[0])] = int(words[1])
            if f"{MARKER}={job}" in words[2]:
                marked.add(int(words[0]))
    return parents, marked


def _descendants(parents: dict[int, int], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def job_processes(job: str, root: int | None = None) -> set[int]:
    """Living processes that carry the job's marker, or descend from `root`; never this process itself."""
    if LINUX:
        parents = _table()
        needle = f"\0{MARKER}={job}\0".encode()
        marked = {pid for pid in parents if needle in b"\0" + _read(f"/proc/{pid}/environ") + b"\0"}
    else:
        parents, marked = _ps(job)
    if root is not None:
        marked |= _descendants(parents, root)
    return marked - {os.getpid()}


def name_of(pid: int) -> str:
    """The short name of a process, also of one that is dead and has not been waited for."""
    return _read(f"/proc/{pid}/comm").decode(errors="replace").strip() or "a process"


def is_tracker(pid: int) -> bool:
    """Whether it is a helper that removes shared memory by itself once its clients are dead."""
    line = _read(f"/proc/{pid}/cmdline")
    return b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line


def shared_files(pid: int) -> set[int]:
    """Inodes of the files of /dev/shm that a process has mapped or open.

    Not their names: a semaphore is made under another name than it has later, and /proc tells the first.
    """
    found: set[int] = set()
    for line in _read(f"/proc/{pid}/maps").split(b"\n"):
        if b" /dev/shm/" in line:
            found.add(int(line.split(None, 5)[4]))
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            if os.readlink(path).startswith("/dev/shm/"):
                found.add(os.stat(path).st_ino)
    except OSError:
        pass
    return found


def sees_all_users_of_shared_memory() -> bool:
    """Whether no other container can share this /dev/shm unseen: the first pid namespace sees everybody, and
    an IPC namespace of its own comes with a /dev/shm of its own.
    """
    try:
        first_pid = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
        return first_pid or os.readlink("/proc/self/ns/ipc") != "ipc:[4026531839]"
    except OSError:
        return False


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the CPU quota of its cgroups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    quota = _quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _quota() -> float | None:
    """The smallest CPU quota, in cores, on the way from this process's cgroup to the root (v1 and v2)."""
    found: list[float] = []
    for line in _read("/proc/self/cgroup").decode(errors="replace").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            bases = [f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            for depth in range(len(parts) + 1):
                found += _limit(os.path.join(base, *parts[:depth]))
    return min(found) if found else None


def _limit(folder: str) -> list[float]:
    words = _read(f"{folder}/cpu.max").split()
    if not words:
        words = _read(f"{folder}/cpu.cfs_quota_us").split() + _read(f"{folder}/cpu.cfs_period_us").split()
    try:
        quota, period = (float(word) for word in words[:2])
    except ValueError:  # absent, or "max"
        return []
    return [quota / period] if quota > 0 and period > 0 else []
