"""Find and control processes through the Linux kernel, with ``ps`` as a fallback on other systems.

Standard library only, and importable by path: agents and ranks' wrappers run without ``site`` and without the
package, so that they start in about 20 ms.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .. import limits

usable_cores = limits.usable_cores
LINUX = sys.platform.startswith("linux")
MARKER = "RINGDANCE_JOB"
"""Environment variable that every process of a job inherits. Its value is the job's ID."""

_TRACKER_S, _MONITOR_S = 0.8, 10.0
_JOB = re.compile(rb"(?:^|\0)" + MARKER.encode() + rb"=([0-9a-f]{8,})(?=\0|$)")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IN_CREATE = 0x100  # the inotify event IN_CREATE, from <sys/inotify.h>


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def watch_directory(path: str) -> int:
    """Return a descriptor that becomes readable when a file is created in ``path``, or -1 if unsupported."""
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
    """Have the kernel SIGKILL this process when its parent exits (Linux only).

    The setting survives ``exec``. The parent may die before the call, so check ``os.getppid()`` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_on_signals() -> int:
    """Return a non-blocking descriptor that becomes readable after SIGCHLD and any signal with a handler."""
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
    """Return the stripped contents of a small file, or an empty string if it cannot be read."""
    return _read(path).decode(errors="replace").strip()


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has exited or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def locked(path: str) -> bool:
    """Return True if another process has locked a file or directory.

    Raises:
        OSError: The path cannot be opened, or its file system does not support locks.
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
    """Return the fields of /proc/PID/stat from the state onwards, or [] if the process is dead."""
    # "pid (name) state ppid ...": the name may contain spaces and parentheses.
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return fields if fields and fields[0] not in (b"Z", b"X") else []


def _processes() -> dict[int, tuple[int, bytes]]:
    """Return the parent and environment of each live process, keyed by pid. Zombies are excluded."""
    processes = {}
    if LINUX:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if fields := _stat(pid):
                processes[int(pid)] = int(fields[1]), _read(f"/proc/{pid}/environ")
    else:
        for line in run(["ps", "-axEwwo", "pid=,ppid=,command="])[1].splitlines():
            pid, parent, *words = line.split()
            processes[int(pid)] = int(parent), "\0".join(words).encode()
    return processes


def run(
    words: Sequence[str], seconds: float = 20.0, environ: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a program without input. End it and its children after ``seconds``.

    Returns:
        Exit code, stdout and stderr. If the program did not start or exit in time: -1, "" and the reason.
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
            os.killpg(process.pid, signal.SIGKILL)  # the whole group, because children hold the pipes open
            if isinstance(error, subprocess.TimeoutExpired):
                return -1, "", f"no answer within {seconds:g} s"
            raise
    return process.returncode, output, errors


def job_processes(job: str, root: int | None = None) -> set[int]:
    """Return live processes with the job's marker, and descendants of ``root``, except this process."""
    processes = _processes()
    needle = f"\0{MARKER}={job}\0".encode()
    marked = {pid for pid, (_, environ) in processes.items() if needle in b"\0" + environ + b"\0"}
    descendants, new = set[int](), set() if root is None else {root}
    while new:
        new = {pid for pid, (parent, _) in processes.items() if parent in new} - descendants
        descendants |= new
    return (marked | descendants) - {os.getpid()}


def marked_processes() -> dict[int, str]:
    """Return the job ID of each of this user's live processes that belongs to a job, keyed by pid."""
    marked = {}
    for pid, (_, environ) in _processes().items():
        mark = _JOB.search(environ)
        if mark and (not LINUX or _owner(pid) == os.getuid()):
            marked[pid] = mark[1].decode()
    return marked


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def start_of(pid: int) -> str:
    """Return a process's start time as text, to detect a reused pid, or "" if the process has exited."""
    if LINUX:
        return b"".join(_stat(pid)[19:20]).decode()
    return run(["ps", "-o", "lstart=", "-p", str(pid)])[1].strip()


def name_of(pid: int) -> str:
    """Return a process's short name, even for a zombie."""
    return text(f"/proc/{pid}/comm") or "a process"


def grace(pid: int) -> float:
    """Return how many seconds a helper gets to exit once its job's ranks are dead, or 0 for other processes.

    In that time, some helpers remove shared memory, and the monitor completes the timeline and the metrics.
    """
    line = _read(f"/proc/{pid}/cmdline")
    if b"ringdance.core.monitor.main" in line:
        return _MONITOR_S
    return _TRACKER_S if b"multiprocessing.resource_tracker" in line or b"torch_shm_manager" in line else 0.0


def _open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the paths of a process's open descriptors in /proc, and their targets."""
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            yield path, os.readlink(path)
    except OSError:
        pass


def shared_files(pid: int) -> set[int]:
    """Return the inodes of the files in /dev/shm that a process has mapped or open.

    Names do not suffice, because /proc shows the temporary name under which a semaphore was created.
    """
    maps = _read(f"/proc/{pid}/maps").split(b"\n")
    inodes = {int(line.split(None, 5)[4]) for line in maps if b" /dev/shm/" in line}
    for path, target in _open_files(pid):
        if target.startswith("/dev/shm/"):
            try:
                inodes.add(os.stat(path).st_ino)
            except OSError:
                break
    return inodes


def sees_all_users_of_shared_memory() -> bool:
    """Return True if no other container can share this /dev/shm unseen.

    The first pid namespace sees all processes, and an IPC namespace comes with its own /dev/shm.
    """
    try:
        first_pid = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
        return first_pid or os.readlink("/proc/self/ns/ipc") != "ipc:[4026531839]"
    except OSError:
        return False


def killed_for_memory() -> int:
    """Return how many processes in this process's cgroup the kernel has killed for lack of memory."""
    names = ("memory.events", "memory.oom_control")  # in cgroup v2 and v1
    text = b"".join(_read(f"{place}/{name}") for place in limits.cgroups("memory") for name in names)
    return max(map(int, re.findall(rb"^oom_kill (\d+)", text, re.MULTILINE)), default=0)


def room(path: str) -> dict[str, Any]:
    """Return the ``total`` and ``free`` bytes of the file system that contains a path.

    Raises:
        OSError: The path does not exist.
    """
    status = os.statvfs(path)
    return {"total": status.f_frsize * status.f_blocks, "free": status.f_frsize * status.f_bavail}


def shared_memory() -> int:
    """Return the free bytes of /dev/shm, or -1 if it does not exist."""
    try:
        return int(room("/dev/shm")["free"])
    except OSError:
        return -1
