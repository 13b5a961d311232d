"""Find and control processes by what the Linux kernel offers, with ``ps`` as a fallback for other systems.

Standard library only, and importable by path: agents and ranks' wrappers run without ``site`` and without the
package, so that they start in some 20 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import limits

usable_cores = limits.usable_cores
LINUX = sys.platform.startswith("linux")
MARKER = "RINGDANCE_JOB"
"""Environment variable that every process of a job inherits; its value is the job's id."""

_TRACKER_S, _MONITOR_S = 0.8, 10.0
_JOB = re.compile(rb"(?:^|\0)" + MARKER.encode() + rb"=([0-9a-f]{8,})(?=\0|$)")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IN_CREATE = 0x100  # of inotify


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def watch_directory(path: str) -> int:
    """Return a descriptor that is readable whenever a file was made in a directory; -1 if not supported."""
    if not LINUX:
        return -1
    import ctypes

    libc = ctypes.CDLL(None)
    descriptor = int(libc.inotify_init1(os.O_CLOEXEC))
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_CREATE) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def die_with_parent() -> None:
    """Have the kernel, if it is Linux, SIGKILL this process when its parent ends.

    It survives ``exec``. The parent may have died before the call: compare ``os.getppid()`` after it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become, on Linux, the parent of all descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_on_signals() -> int:
    """Return a non-blocking descriptor that is readable after a signal with a handler, and after SIGCHLD."""
    wake, write = os.pipe()
    for end in (wake, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def text(path: str) -> str:
    """Return the content of a small file, stripped; "" if it cannot be read."""
    return _read(path).decode(errors="replace").strip()


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended or is another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def locked(path: str) -> bool:
    """Return whether another process has locked a file or directory.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; none if the process is dead."""
    # "pid (name) state ppid ...": the name may hold spaces and parentheses.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields if fields and fields[0] not in (b"Z", b"X") else []


def _processes() -> dict[int, tuple[int, bytes]]:
    """Return parent and environment of all living processes; zombies are left out."""
    found = {}
    if LINUX:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if fields := _stat(pid):
                found[int(pid)] = int(fields[1]), _read(f"/proc/{pid}/environ")
    else:
        for line in run(["ps", "-axEwwo", "pid=,ppid=,command="])[1].splitlines():
            pid, parent, *words = line.split()
            found[int(pid)] = int(parent), "\0".join(words).encode()
    return found


def run(
    words: Sequence[str], seconds: float = 20.0, environ: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a program without input; end it with its children after that time.

    Returns:
        Exit code, stdout and stderr; -1, "" and the reason if it did not end by itself.
    """
    import subprocess

    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environ, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return -1, "", error.strerror or str(error)
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # children too hold the pipes open
            if isinstance(error, subprocess.TimeoutExpired):
                return -1, "", f"no answer within {seconds:g} s"
            raise
    return process.returncode, output, errors


def job_processes(job: str, root: int | None = None) -> set[int]:
    """Return living processes that carry the job's marker or descend from `root`, without this one."""
    processes = _processes()
    needle = f"\0{MARKER}={job}\0".encode()
    found = {pid for pid, (_, environ) in processes.items() if needle in b"\0" + environ + b"\0"}
    descendants, new = set[int](), set() if root is None else {root}
    while new:
        new = {pid for pid, (parent, _) in processes.items() if parent in new} - descendants
        descendants |= new
    return (found | descendants) - {os.getpid()}


class MarkedProcess(NamedTuple):
    """A process of a job: the job's id, and all variables that the process was started with."""

    job: str
    environ: bytes


def marked_processes() -> dict[int, MarkedProcess]:
    """Return this user's living processes that belong to a job, by pid."""
    found = {}
    for pid, (_, environ) in _processes().items():
        mark = _JOB.search(environ)
        if mark and (not LINUX or _owner(pid) == os.getuid()):
            found[pid] = MarkedProcess(mark[1].decode(), environ)
    return found


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def start_of(pid: int) -> str:
    """Return what distinguishes a process from a later one with the same pid; "" if there is none."""
    if LINUX:
        return b"".join(_stat(pid)[19:20]).decode()
    return run(["ps", "-o", "lstart=", "-p", str(pid)])[1].strip()


def name_of(pid: int) -> str:
    """Return the short name of a process, also of a zombie."""
    return text(f"/proc/{pid}/comm") or "a process"


def grace(pid: int) -> float:
    """Return how many seconds a helper gets to end by itself once its job's ranks are dead; 0: no helper.

    Some remove shared memory then; the monitor completes the timeline and the metrics.
    """
    line = _read(f"/proc/{pid}/cmdline")
    if b"ringdance.core.monitor.main" in line:
        return _MONITOR_S
    return _TRACKER_S if b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line else 0.0


def _open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the paths of a process's open descriptors in /proc, and what they refer to."""
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            yield path, os.readlink(path)
    except OSError:
        pass


def shared_files(pid: int) -> set[int]:
    """Return the inodes of the files of /dev/shm that a process has mapped or open.

    Not their names: a semaphore is created under another name than its later one, and /proc shows the first.
    """
    maps = _read(f"/proc/{pid}/maps").split(b"\n")
    found = {int(line.split(None, 5)[4]) for line in maps if b" /dev/shm/" in line}
    for path, target in _open_files(pid):
        if target.startswith("/dev/shm/"):
            try:
                found.add(os.stat(path).st_ino)
            except OSError:
                break
    return found


def sees_all_users_of_shared_memory() -> bool:
    """Return whether no other container can share this /dev/shm unseen.

    The first pid namespace sees all processes, and an IPC namespace comes with a /dev/shm of its own.
    """
    try:
        first_pid = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
        return first_pid or os.readlink("/proc/self/ns/ipc") != "ipc:[4026531839]"
    except OSError:
        return False


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed because this process's cgroup had no memory left."""
    names = ("memory.events", "memory.oom_control")  # of cgroups v2 and v1
    text = b"".join(_read(f"{place}/{name}") for place in limits.cgroups("memory") for name in names)
    return max(map(int, re.findall(rb"^oom_kill (\d+)", text, re.MULTILINE)), default=0)


def room(path: str) -> dict[str, Any]:
    """Return ``total`` and ``free`` bytes of a path's file system.

    Raises:
        OSError: there is no such path.
    """
    found = os.statvfs(path)
    return {"total": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}


def shared_memory() -> int:
    """Return the free bytes of /dev/shm, -1 if there is none."""
    try:
        return int(room("/dev/shm")["free"])
    except OSError:
        return -1
