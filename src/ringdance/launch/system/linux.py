"""What only Linux can do, with a fallback for other systems: dying with a parent, finding a job's processes.

Standard library only, and importable by path: guardian.py and rank.py run without ``site`` and
without the package. On other systems :func:`die_with_parent` and :func:`adopt_orphans` do
nothing and the processes are found through ``ps``.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import NamedTuple

LINUX = sys.platform.startswith("linux")
MARKER = "RINGDANCE_JOB"
"""Environment variable that every process of a job inherits; its value is the job's id."""

_JOB = re.compile(rb"(?:^|\0)" + MARKER.encode() + rb"=([0-9a-f]{8,})(?=\0|$)")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IN_CREATE = 0x100  # of inotify


def _prctl(option: int, value: int) -> bool:
    if not LINUX:
        return False
    import ctypes

    try:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def watch_folder(path: str) -> int:
    """A descriptor that can be read whenever something was made in a folder; -1 if there is no such thing."""
    if not LINUX:
        return -1
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        descriptor = int(libc.inotify_init1(os.O_CLOEXEC))
        if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_CREATE) < 0:
            os.close(descriptor)
            descriptor = -1
    except (OSError, AttributeError):
        return -1
    return descriptor


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


class Marked(NamedTuple):
    """A process that some job's marker names: that job's id, and all variables it was started with."""

    job: str
    environ: bytes


def marked_processes() -> dict[int, Marked]:
    """Living processes of this user that belong to a job of ours, by pid."""
    if LINUX:
        environs = {pid: _read(f"/proc/{pid}/environ") for pid in _table() if _owner(pid) == os.getuid()}
    else:
        environs = {pid: line.replace(b" ", b"\0") for pid, line in _ps_lines()}
    found = {}
    for pid, environ in environs.items():
        mark = _JOB.search(environ)
        if mark:
            found[pid] = Marked(mark[1].decode(), environ)
    return found


def _ps_lines() -> list[tuple[int, bytes]]:
    """This user's processes with their command lines and variables, from ``ps`` (macOS)."""
    import subprocess

    done = subprocess.run(["ps", "-xEwwo", "pid=,command="], capture_output=True, check=False)
    lines = (line.split(None, 1) for line in done.stdout.splitlines())
    return [(int(words[0]), words[1]) for words in lines if len(words) == 2]


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def start_of(pid: int) -> str:
    """Tells a process from a later one with the same pid; "" if there is none."""
    if LINUX:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        return fields[19].decode() if len(fields) > 19 and fields[0] not in (b"Z", b"X") else ""
    import subprocess

    line = ["ps", "-o", "lstart=", "-p", str(pid)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def began(pid: int) -> float:
    """When a process was started, about (seconds since the epoch); now, where that is not known."""
    try:
        return os.stat(f"/proc/{pid}").st_mtime
    except OSError:
        return time.time()


def name_of(pid: int) -> str:
    """The short name of a process, also of one that is dead and has not been waited for."""
    return _read(f"/proc/{pid}/comm").decode(errors="replace").strip() or "a process"


def is_tracker(pid: int) -> bool:
    """Whether it is a helper that removes shared memory by itself once its clients are dead."""
    line = _read(f"/proc/{pid}/cmdline")
    return b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line


def bound_sockets(pid: int) -> list[str]:
    """Paths of the Unix sockets that a process has open and somebody bound to a path."""
    inodes = set[bytes]()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1].encode())
    except OSError:
        pass
    lines = [line.split(None, 7) for line in _read(f"/proc/{pid}/net/unix").split(b"\n")]
    return [os.fsdecode(fields[7]) for fields in lines if len(fields) == 8 and fields[6] in inodes]


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
