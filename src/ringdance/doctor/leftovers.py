"""What earlier jobs have left: ranks without a launcher, files in /dev/shm."""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from typing import Any

import psutil

from ringdance.doctor.check import NOTE, WARNING, Check, Finding, Host, Usage, size
from ringdance.launch.hosts import several
from ringdance.launch.system import linux
from ringdance.launch.system.cleanup import OF_RANKS

_NEW_S = 60.0
_SMALL = 1 << 20

# --- facts -----------------------------------------------------------------------------------------


def leftovers_facts(usage: Usage) -> dict[str, Any]:
    """Living ranks whose launcher has ended; files of /dev/shm that no process uses."""
    table = {p.pid: p.info for p in psutil.process_iter(["ppid", "name"])}
    return {"orphans": _find_orphans(table), "shared": _unused_shared(table)}


def _find_orphans(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
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


# --- checks ----------------------------------------------------------------------------------------


def _orphans(host: Host) -> Finding:
    found = host["leftovers"]["orphans"]
    if not found:
        return Finding("no ranks of earlier jobs")
    named = several([f"{entry['name']} {entry['pid']}" for entry in found])
    return Finding(
        f"{len(found)} processes of earlier jobs still run: {named}",
        "kill -9 " + " ".join(str(entry["pid"]) for entry in found[:20]),
    )


def _shared_memory_left(host: Host) -> Finding:
    found = host["leftovers"]["shared"]
    if not found:
        return Finding("no unused files in /dev/shm")
    names = [entry["name"] for entry in found]
    total = sum(entry["bytes"] for entry in found)
    # No `rm`: a name does not prove which program made it, and that may need it again.
    paths = shlex.join(f"/dev/shm/{name}" for name in names[:20])
    return Finding(
        f"{len(found)} files that no process uses hold {size(total)} of /dev/shm: {several(names, 3)}",
        f"remove those of programs that have ended; see when they were made: ls -ld {paths}",
        NOTE if total < _SMALL else "",
    )


CHECKS = (
    Check("orphans", "leftovers", WARNING,
          "ranks of earlier jobs whose launcher has ended: they hold cores, memory and GPUs", _orphans),
    Check("shared-memory-left", "leftovers", WARNING,
          "files in /dev/shm that no process uses: they take memory until they are removed",
          _shared_memory_left),
)  # fmt: skip
