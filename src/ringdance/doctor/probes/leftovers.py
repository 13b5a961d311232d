"""What earlier jobs have left: ranks without a launcher, files in /dev/shm."""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.launch.system import linux
from ringdance.launch.system.cleanup import OF_RANKS

_NEW_S = 60.0


def collect(usage: Usage) -> dict[str, Any]:
    """Number of threads; living ranks whose launcher has ended; files of /dev/shm that no process uses."""
    table = {p.pid: p.info for p in psutil.process_iter(["ppid", "name", "num_threads"])}
    return {
        "threads": sum(info["num_threads"] or 0 for info in table.values()),
        "orphans": _orphans(table),
        "shared": _unused_shared(table),
    }


def _orphans(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return processes of a job whose first ancestor without the job's marker is init."""
    jobs = {pid: marked.job for pid, marked in linux.marked_processes().items()}
    found = []
    for pid, job in jobs.items():
        ancestor = pid
        while jobs.get(ancestor) == job and ancestor in table:
            ancestor = table[ancestor]["ppid"]
        if ancestor <= 1:
            found.append({"pid": pid, "name": table[pid]["name"], "job": job})
    return found


def _unused_shared(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return this user's files of libraries in /dev/shm that no process has open or mapped.

    None where a container that cannot be seen from here may use the same /dev/shm. Files younger than a
    minute are left out: one that was just made is not mapped yet.
    """
    if not linux.LINUX or not linux.sees_all_users_of_shared_memory():
        return []
    candidates = {}
    for entry in os.scandir("/dev/shm"):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        own = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
        if re.match(OF_RANKS, entry.name) and own and time.time() - status.st_mtime > _NEW_S:
            candidates[status.st_ino] = {"name": entry.name, "bytes": status.st_blocks * 512}
    if candidates:
        for pid in table:
            for inode in linux.shared_files(pid):
                candidates.pop(inode, None)
    return list(candidates.values())
