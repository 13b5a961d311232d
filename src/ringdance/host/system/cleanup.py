"""End every process of a job and remove what the job left behind: directories and shared-memory files.

Standard library only: agents run it without ``site``.

Note [What is removed from /dev/shm]
A file is removed if (1) its name is one that an MPI library, PyTorch or Python gives, (2) it did not exist
before the job, (3) a process of the job was seen to have it mapped or open, or its name contains the pid of
such a process, and (4) no live process has it mapped or open. The name alone never suffices, because
another program's file that is closed and not yet removed looks the same. A dead process can no longer be
inspected. ``Cleanup.watch()`` therefore looks while the job runs, and keeps notes in the job's first
directory for whichever process has to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable

from ..directories import host_directory, is_own
from . import linux

_SHM = "/dev/shm"
_LIMIT_S = 4.0
_INSPECT_S = 0.4
_INSPECT_ALL_S = 1.5  # time limit for inspecting all processes of the host
_WATCH_S = 0.002  # interval between checks of /dev/shm
_WATCH_FREE_S = 1.0  # seconds of CPU time for frequent checks at the start, when most files are created
_WATCH_SHARE = 0.1  # maximum share of a core for later checks
_POLL_S = 0.1  # minimum time between later checks, and between all checks if the kernel reports no changes
_OLD_S = 10.0  # minimum age of an abandoned directory; a younger one might not be locked yet
_NOTES = "shared-memory"
_OF_TORCH = re.compile(r"torch_(\d+)_")
# Files in /dev/shm with other names may be the user's own data, even if a process of the job maps them.
_OF_LIBRARIES = re.compile(
    r"mpich_|Intel_MPI|impi_|sm_segment\.|vader_segment\.|osc_sm|osc_rdma|ompi_|ucx_shm_|torch_\d+_|psm_"
    r"|sem[._]"
)


def make_directories(directories: Iterable[str], job: str) -> None:
    """Create a job's directories and lock them while this process, or one that it forks, is alive.

    Also removes directories next to them that earlier jobs left behind and that no process has locked.

    Raises:
        OSError: A directory cannot be created.
    """
    for directory in directories:
        for left in abandoned(os.path.dirname(directory)):
            shutil.rmtree(left, ignore_errors=True)
        os.mkdir(directory, 0o700)
        with contextlib.suppress(OSError):  # without the symlink, no later job will remove the directory
            # A short symlink is stored in its inode, so this works even on a full disk.
            os.symlink(job, os.path.join(directory, linux.MARKER))
        descriptor = os.open(directory, os.O_RDONLY)  # never closed, to hold the lock until exit
        with contextlib.suppress(OSError):  # on file systems without locks, later jobs remove nothing
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def job_of(directory: str) -> str:
    """Return the ID of the job that created a directory on this host, or an empty string if no job did."""
    try:
        job = os.readlink(os.path.join(directory, linux.MARKER))
    except OSError:
        return ""
    return job if is_own(directory) and directory == host_directory(os.path.dirname(directory), job) else ""


def abandoned(base: str) -> list[str]:
    """Return the directories in ``base`` that this user's dead jobs (no lock, no process) left behind."""
    left = []
    for path in (entry.path for entry in _entries(base) if entry.name.startswith("ringdance-")):
        job = job_of(path)
        with contextlib.suppress(OSError):  # the job itself is removing it, or the file system has no locks
            if job and time.time() - os.lstat(path).st_mtime > _OLD_S and not linux.locked(path):
                left += [] if linux.job_processes(job) else [path]
    return left


class Cleanup:
    """Cleans up after one job.

    Args:
        job: The job's ID, the value of the marker variable.
        directories: Directories to remove with all their contents.
        began: Start of the job, seconds since the epoch. Older files in shared memory do not belong to it.
        root: Pid of a process whose descendants belong to the job, even if they lack the marker variable.
        reap: Called repeatedly, to collect the exit status of children.
    """

    def __init__(
        self, job: str, directories: Iterable[str], began: float, root: int | None = None,
        reap: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._directories, self._began = job, tuple(directories), began
        self._root, self._reap = root, reap
        self._mapped: set[int] = set()  # inodes
        self._pids: set[int] = set()
        self._inspected: set[int] = set()
        self._before: set[int] = set()  # inodes of files that existed before the job
        self._seen: set[int] = set()  # inodes of files that the job used while it ran
        self._watching = False
        self.backup = 0
        """Pid of the process that cleans up if this one is killed."""

    def run(self, failed: bool = True) -> bool:
        """Kill processes and remove files. Returns True if nothing is left.

        Usually takes tens of milliseconds, and at most 4 s, unless a monitor is completing a timeline file.

        A job that has not ``failed`` may leave shared memory behind on purpose. In that case, memory is
        removed only if a process that must be killed here has mapped it.
        """
        self._watching = False
        left = self._end_processes()
        if failed:
            self._mapped |= self._seen | self._noted()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        self._remove_shared()
        if self.backup:
            with contextlib.suppress(ChildProcessError):  # once killed, its pid may have been reused
                os.waitid(os.P_PID, self.backup, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                linux.send_signal(self.backup, signal.SIGKILL)
        return not left

    def note(self, pid: int) -> None:
        """Record a process of the job, because it may be dead when the cleanup starts."""
        self._pids.add(pid)

    def watch(self) -> None:
        """Start recording which shared memory the job uses. See Note [What is removed from /dev/shm]."""
        if self._watching:
            return
        self._watching = True
        self._before = set(_shared(0.0).values())
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        known, events, spent = self._before, linux.watch_directory(_SHM), 0.0
        while self._watching:
            if events >= 0:
                os.read(events, 65536)
            began = time.monotonic()
            entries = _shared(0.0).items()
            there = {inode for path, inode in entries if not _OF_TORCH.match(os.path.basename(path))}
            new, known = there - known, there
            if new:
                pids = linux.job_processes(self._job, self._root)
                self._keep_notes(there & (self._seen | new & set().union(*map(linux.shared_files, pids))))
            cost = time.monotonic() - began
            spent += cost
            often = events >= 0 and spent < _WATCH_FREE_S
            time.sleep(_WATCH_S if often else max(_POLL_S, cost / _WATCH_SHARE))

    def _keep_notes(self, seen: set[int]) -> None:
        if seen != self._seen and self._watching:
            notes = os.path.join(self._directories[0], _NOTES)
            with contextlib.suppress(OSError):
                with open(f"{notes}.part", "w") as file:
                    file.write(" ".join(map(str, seen)))
                os.replace(f"{notes}.part", notes)
        self._seen = seen

    def _noted(self) -> set[int]:
        try:
            with open(os.path.join(self._directories[0], _NOTES)) as file:
                return set(map(int, file.read().split()))
        except (OSError, IndexError):
            return set()

    def fork_backup(self) -> None:
        """Fork a process that cleans up if this one is killed. ``run()`` kills the forked process."""
        read, write = os.pipe()
        self.backup = os.fork()
        if self.backup:
            os.close(read)  # `write` is closed only when this process exits
            return
        os.close(write)
        os.setsid()
        signal.set_wakeup_fd(-1)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # otherwise ssh would also wait for this process
            os.dup2(null, descriptor)
        os.read(read, 1)
        self._root, self._reap = None, lambda: None
        self.run()
        os._exit(0)

    def _end_processes(self) -> set[int]:
        """Kill processes until two scans in a row find none, because a process may fork during a scan."""
        began, quiet, left, limit = time.monotonic(), 0, set[int](), _LIMIT_S
        while quiet < 2 and (passed := time.monotonic() - began) < limit:
            left = linux.job_processes(self._job, self._root) - {self.backup}
            self._mapped |= _used_by(left - self._inspected, _INSPECT_S)[0]
            self._inspected |= left
            self._pids |= left
            graces = {pid: linux.grace(pid) for pid in left}
            limit = _LIMIT_S + max(graces.values(), default=0.0)
            victims = {pid for pid, seconds in graces.items() if passed >= seconds}
            for pid in victims:
                linux.send_signal(pid, signal.SIGKILL)
            quiet = 0 if left else quiet + 1
            time.sleep(0.01)
            self._reap()
        return left

    def _remove_shared(self) -> None:
        """Remove the job's files from shared memory. See Note [What is removed from /dev/shm]."""
        suspects = {path: inode for path, inode in _shared(self._began).items() if inode not in self._before}
        own = {path for path, inode in suspects.items() if inode in self._mapped or self._has_our_pid(path)}
        if not own:
            return
        pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        in_use, complete = _used_by(pids, _INSPECT_ALL_S)
        for path in own:
            # A process that could not be inspected may belong to another program that uses the file.
            if complete and suspects[path] not in in_use:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _has_our_pid(self, path: str) -> bool:
        owner = _OF_TORCH.match(os.path.basename(path))
        # The pid proves nothing if other containers share /dev/shm: a process there may have the same pid.
        return owner is not None and int(owner[1]) in self._pids and linux.sees_all_users_of_shared_memory()


def _used_by(pids: Iterable[int], seconds: float) -> tuple[set[int], bool]:
    """Return the inodes in /dev/shm that processes use, and whether all processes were inspected in time.

    The kernel blocks readers of a process's memory map while the process changes it, sometimes for seconds.
    """
    used: list[set[int]] = []

    def inspect() -> None:
        for pid in pids:
            used.append(linux.shared_files(pid))

    if not pids:
        return set(), True
    thread = threading.Thread(target=inspect, daemon=True)
    thread.start()
    thread.join(seconds)
    return set().union(*list(used)), not thread.is_alive()


def _shared(began: float) -> dict[str, int]:
    """Return paths and inodes of shared-memory files that a job started at ``began`` may have created."""
    files = {}
    for entry in _entries(_SHM):
        if _OF_LIBRARIES.match(entry.name):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and max(status.st_ctime, status.st_mtime) >= began - 1.0:
                    files[entry.path] = status.st_ino
    return files


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
