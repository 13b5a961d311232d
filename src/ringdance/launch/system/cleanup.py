"""End every process of a job and remove what it left: folders, and files in shared memory.

Standard library only (the guardian runs it without ``site``); the launcher runs it as well
when the guardian has been killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable

from ..directories import host_folder
from . import linux

_SHM = "/dev/shm"
_SPARED_S = 0.8
_LIMIT_S = 4.0
_ASKED_S = 0.4
_USERS_ASKED_S = 1.5  # all processes of the host
_WATCH_S = 0.002  # from one look at /dev/shm to the next
_WATCH_FREE_S = 1.0  # of looking without regard to its cost: most files are made when a job starts
_WATCH_SHARE = 0.1  # of a core, at most, beyond that
_POLL_S = 0.1  # then, and where the kernel does not tell of changes
_NOTES = "shared-memory"
_TEMPORARY = ("TMPDIR", "TEMP", "TMP", "TEMPDIR")  # where PyTorch looks, in this order
# A file in /dev/shm with another name may be the user's own data, also if a process of the job has mapped it.
_OF_MPI = re.compile(r"mpich_|Intel_MPI|impi_|sm_segment\.|vader_segment\.|osc_sm|osc_rdma|ompi_|ucx_shm_")
_OF_TORCH = re.compile(r"torch_(\d+)_")
_OF_PYTHON = re.compile(r"torch_\d+_|psm_|sem\.|sem_")


_OLD_S = 10.0  # a younger folder may just be about to be locked


def make_folders(folders: Iterable[str], job: str) -> None:
    """Make a job's folders and lock them for as long as this process, or one that it forks, lives.

    What earlier jobs left beside them, all of whose guards were killed, is removed.

    Raises:
        OSError: one cannot be made.
    """
    for folder in folders:
        for left in abandoned(os.path.dirname(folder)):
            shutil.rmtree(left, ignore_errors=True)
        os.mkdir(folder, 0o700)
        with contextlib.suppress(OSError):  # without it no later job will remove the folder
            os.symlink(job, os.path.join(folder, linux.MARKER))  # takes no room, also on a full disk
        descriptor = os.open(folder, os.O_RDONLY)  # never closed: the lock ends with the process
        with contextlib.suppress(OSError):  # some network file systems have no locks; nor then a removal
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def job_of(folder: str) -> str:
    """The job whose launcher made that folder on this host, by the marker in it; "" if none did."""
    try:
        job = os.readlink(os.path.join(folder, linux.MARKER))
        status = os.lstat(folder)
    except OSError:
        return ""
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return job if ours and folder == host_folder(os.path.dirname(folder), job) else ""


def abandoned(base: str) -> list[str]:
    """The folders in `base` that this user's dead jobs have left: nobody guards them, no process is left."""
    found = []
    for name in _listed(base):
        path = os.path.join(base, name)
        job = job_of(path) if name.startswith("ringdance-") else ""
        try:
            if job and time.time() - os.lstat(path).st_mtime > _OLD_S and not _locked(path):
                found += [] if linux.job_processes(job) else [path]
        except OSError:  # its own job removes it just now, or there are no locks
            continue
    return found


def _locked(folder: str) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class Sweep:
    """One job's cleaning.

    Args:
        job: the job's id, the value of the marker variable.
        folders: removed with all they hold.
        began: when the job began, seconds since the epoch; older files in shared memory are not its.
        root: whose descendants belong to the job too, marked or not (the guardian).
        reap: called now and then by a parent of such processes to take their exit status.
    """

    def __init__(
        self,
        job: str,
        folders: Iterable[str],
        began: float,
        root: int | None = None,
        reap: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._folders, self._began = job, tuple(folders), began
        self._root, self._reap = root, reap
        self._mapped: set[int] = set()  # inodes
        self._pids: set[int] = set()
        self._asked: set[int] = set()
        self._before: set[int] = set()  # inodes of files that were there before the job
        self._seen: set[int] = set()  # inodes, while the job ran
        self._watching = False

    def run(self, failed: bool = True) -> bool:
        """Kill and remove; True if nothing is left. Takes some tens of milliseconds, 4 s at most.

        A job that has not `failed` may leave shared memory behind on purpose: then only what the processes
        that must be killed here have mapped is removed.
        """
        self._watching = False
        left = self._end_processes()
        if failed:
            self._mapped |= self._seen | self._noted()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._remove_shared()
        if failed:
            _remove_dead_managers(self._began)
        return not left

    def watch(self) -> None:
        """Note from now on which files of shared memory the job's processes use: a dead one cannot be asked.

        The notes lie in the job's first folder too, for whoever must clean up in this process's place.
        """
        self._watching = True
        self._before = set(_shared(0.0).values())
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        known, events, spent = self._before, linux.watch_folder(_SHM), 0.0
        while self._watching:
            if events >= 0:
                os.read(events, 65536)
            began = time.monotonic()
            found = _shared(0.0).items()
            there = {inode for path, inode in found if not _OF_TORCH.match(os.path.basename(path))}
            new, known = there - known, there
            if new:
                pids = linux.job_processes(self._job, self._root)
                self._note_shared(there & (self._seen | new & set().union(*map(linux.shared_files, pids))))
            cost = time.monotonic() - began
            spent += cost
            often = events >= 0 and spent < _WATCH_FREE_S
            time.sleep(_WATCH_S if often else max(_POLL_S, cost / _WATCH_SHARE))

    def _note_shared(self, seen: set[int]) -> None:
        if seen != self._seen and self._watching:
            notes = os.path.join(self._folders[0], _NOTES)
            with contextlib.suppress(OSError):
                with open(f"{notes}.part", "w") as file:
                    file.write(" ".join(map(str, seen)))
                os.replace(f"{notes}.part", notes)
        self._seen = seen

    def _noted(self) -> set[int]:
        try:
            with open(os.path.join(self._folders[0], _NOTES)) as file:
                return set(map(int, file.read().split()))
        except (OSError, IndexError):
            return set()

    def outlive(self) -> None:
        """Fork a process that does it as well, should this one be killed; that ends with the sweep itself."""
        read, write = os.pipe()
        if os.fork():
            os.close(read)  # `write` is closed by this process's end, and by that alone
            return
        os.close(write)
        os.setsid()
        signal.set_wakeup_fd(-1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # else ssh waits for this process too
            os.dup2(nowhere, descriptor)
        os.read(read, 1)
        self._root, self._reap = None, lambda: None
        self.run()
        os._exit(0)

    def _end_processes(self) -> set[int]:
        """Kill until two looks in a row find none: a process may fork while the table is being read."""
        began, quiet, left = time.monotonic(), 0, set[int]()
        while quiet < 2 and time.monotonic() - began < _LIMIT_S:
            left = linux.job_processes(self._job, self._root)
            self._mapped |= _used_by(left - self._asked, _ASKED_S)[0]
            self._asked |= left
            self._pids |= left
            # Helpers that unlink shared memory when their clients are dead get a moment to do so.
            victims = {pid for pid in left if not linux.is_tracker(pid)}
            if not victims and time.monotonic() - began > _SPARED_S:
                victims = left
                self._folders += _of_managers(victims)
            for pid in victims:
                _kill(pid)
            quiet = 0 if left else quiet + 1
            time.sleep(0.01)
            self._reap()
        return left

    def _remove_shared(self) -> None:
        """Remove what the job's processes were seen to map, or its name tells, if no process uses it.

        Never by the name alone: what another program has closed and not removed looks the same.
        """
        suspects = {path: inode for path, inode in _shared(self._began).items() if inode not in self._before}
        ours = {path for path, inode in suspects.items() if inode in self._mapped or self._was_ours(path)}
        if not ours:
            return
        pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        in_use, whole = _used_by(pids, _USERS_ASKED_S)
        for path in ours:
            # Another program may have attached it, and be the one that could not be asked.
            if whole and suspects[path] not in in_use:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _was_ours(self, path: str) -> bool:
        owner = _OF_TORCH.match(os.path.basename(path))
        # Where other containers may use this /dev/shm, their processes have the same numbers.
        return owner is not None and int(owner[1]) in self._pids and linux.sees_all_users_of_shared_memory()

    def note(self, pid: int) -> None:
        """Remember a process of the job that may be dead by the time of the sweep."""
        self._pids.add(pid)


def _of_managers(pids: Iterable[int]) -> tuple[str, ...]:
    """The folders of PyTorch's managers of shared memory, which remove them 2 s after their last client."""
    folders = {os.path.dirname(path) for pid in pids for path in linux.bound_sockets(pid)}
    return tuple(folder for folder in folders if os.path.basename(folder).startswith("torch-shm-dir-"))


def _remove_dead_managers(began: float) -> None:
    """Remove what a manager leaves that ends while it starts, since the rank that wanted it is dead.

    Nobody saw whose it was; but nobody can lose anything with it: a folder younger than the job that holds
    nothing but a socket on which nobody listens.
    """
    base = next((os.environ[name] for name in _TEMPORARY if os.environ.get(name)), "/tmp")
    for name in _listed(base):
        path = os.path.join(base, name)
        if name.startswith("torch-shm-dir-") and _listed(path) == ["manager.sock"]:
            file = os.path.join(path, "manager.sock")
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if status.st_uid == os.getuid() and status.st_mtime >= began - 1.0 and _refused(file):
                    os.unlink(file)
                    os.rmdir(path)


def _refused(path: str) -> bool:
    """Whether nobody listens on a Unix socket: asked twice, since a listener binds it a moment earlier."""
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            if sock.connect_ex(path) != errno.ECONNREFUSED:
                return False
        time.sleep(0.02)
    return True


def _used_by(pids: Iterable[int], seconds: float) -> tuple[set[int], bool]:
    """What those processes use of /dev/shm (inodes), and whether all could be asked in that time.

    The kernel makes the reader of a process's map wait while that process changes it, at times for seconds.
    """
    found: list[set[int]] = []
    pids = list(pids)

    def ask() -> None:
        for pid in pids:
            found.append(linux.shared_files(pid))

    if not pids:
        return set(), True
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return set().union(*list(found)), not asking.is_alive()


def _shared(began: float) -> dict[str, int]:
    """Files of shared memory that may be a job's that began then: path and inode."""
    names = [name for name in _listed(_SHM) if _OF_MPI.match(name) or _OF_PYTHON.match(name)]
    inodes = {path: _inode_since(path, began - 1.0) for path in (f"{_SHM}/{name}" for name in names)}
    return {path: inode for path, inode in inodes.items() if inode}


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _inode_since(path: str, began: float) -> int:
    """The inode of a file of this user that has been changed since then, else 0."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    recent = max(status.st_ctime, status.st_mtime) >= began
    return status.st_ino if recent and status.st_uid == os.getuid() else 0
