"""End every process of a job and remove what it left: folders, and files in shared memory.

Standard library only (the guardian runs it without ``site``); the launcher runs it as well
when the guardian has been killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable

from . import linux

_SHM = "/dev/shm"
_SPARED_S = 0.8
_LIMIT_S = 4.0
_ASKED_S = 0.4
# Names that belong to a job's libraries; anything else in /dev/shm may be the user's own data.
_OF_MPI = re.compile(r"mpich_|Intel_MPI|impi_|sm_segment\.|vader_segment\.|osc_sm|osc_rdma|ompi_")
_OF_TORCH = re.compile(r"torch_(\d+)_")
_OF_PYTHON = re.compile(r"torch_\d+_|psm_|sem\.|sem_")


_OLD_S = 10.0  # a younger folder may just be about to be locked


def make_folders(folders: Iterable[str]) -> None:
    """Make a job's folders and lock them for as long as this process, or one that it forks, lives.

    What earlier jobs left beside them, all of whose guards were killed, is removed.

    Raises:
        OSError: one cannot be made.
    """
    for folder in folders:
        _remove_abandoned(folder)
        os.mkdir(folder, 0o700)
        descriptor = os.open(folder, os.O_RDONLY)  # never closed: the lock ends with the process
        with contextlib.suppress(OSError):  # some network file systems have no locks; nor then a removal
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def _remove_abandoned(folder: str) -> None:
    """Remove the folders of dead jobs of this user and host that lie beside a job's."""
    base, name = os.path.split(folder)
    same = re.compile(r"ringdance-[0-9a-f]{12}-" + re.escape(name.split("-", 2)[2]))
    for other in os.listdir(base):
        path = os.path.join(base, other)
        try:
            status = os.lstat(path)
            ours = same.fullmatch(other) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > _OLD_S and not _locked(path):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its own job removes it just now
            continue


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

    def run(self, failed: bool = True) -> bool:
        """Kill and remove; True if nothing is left. Takes some tens of milliseconds, 4 s at most.

        A job that has not `failed` has removed its shared memory itself: then nothing is guessed about that.
        """
        left = self._end_processes()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._remove_shared(failed)
        return not left

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
            self._mapped |= _used_by(left - self._pids, _ASKED_S)[0]
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

    def _remove_shared(self, failed: bool) -> None:
        names = [name for name in _listed() if _OF_MPI.match(name) or _OF_PYTHON.match(name)]
        inodes = {path: _inode_since(path, self._began - 1.0) for path in (f"{_SHM}/{n}" for n in names)}
        suspects = {path: inode for path, inode in inodes.items() if inode}
        if not suspects:
            return
        pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
        in_use, whole = _used_by(pids, _ASKED_S)
        free = {path for path, inode in suspects.items() if inode not in in_use}
        certain = {path for path in free if suspects[path] in self._mapped or self._was_ours(path)}
        if failed and whole and linux.sees_all_users_of_shared_memory():
            # A segment that only the killed process had open was in nobody's table when the sweep began.
            certain |= {path for path in free if not _owner_lives(path)}
        for path in certain:
            try:
                os.unlink(path)
            except OSError:
                pass

    def _was_ours(self, path: str) -> bool:
        owner = _OF_TORCH.match(os.path.basename(path))
        return owner is not None and int(owner[1]) in self._pids

    def note(self, pid: int) -> None:
        """Remember a process of the job that may be dead by the time of the sweep."""
        self._pids.add(pid)


def _of_managers(pids: Iterable[int]) -> tuple[str, ...]:
    """The folders of PyTorch's managers of shared memory, which remove them 2 s after their last client."""
    folders = {os.path.dirname(path) for pid in pids for path in linux.bound_sockets(pid)}
    return tuple(folder for folder in folders if os.path.basename(folder).startswith("torch-shm-dir-"))


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


def _owner_lives(path: str) -> bool:
    owner = _OF_TORCH.match(os.path.basename(path))
    return owner is not None and os.path.exists(f"/proc/{owner[1]}")


def _listed() -> list[str]:
    try:
        return os.listdir(_SHM)
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
