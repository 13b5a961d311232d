"""What earlier jobs have left: zombies, ranks without a launcher, shared memory, session folders."""

from __future__ import annotations

import glob
import os
import re
import stat
import time
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted
from ringdance.launch.directories import bases
from ringdance.launch.system import cleanup, linux

_SHARED = re.compile(
    r"mpich_|Intel_MPI|impi_|sm_segment\.|vader_segment\.|osc_sm|osc_rdma|ompi_|ucx_shm_|torch_"
)
_SESSIONS = ("ompi.*", "prte.*", "pmix-*", "openmpi-sessions-*")
_OLD_S, _NEW_S = 3600.0, 60.0
_JOB = re.compile(rb"(?:^|\0)" + linux.MARKER.encode() + rb"=([^\0]*)")


def look(wanted: Wanted) -> dict[str, Any]:
    """Zombies; living ranks whose launcher is gone; files of /dev/shm that no process uses; old folders.

    `folders` are of dead jobs of ours, by the marker in them; `sessions` have names that MPI libraries give.
    """
    table = _processes()
    jobs = _jobs(table)
    places = bases(os.environ)
    return {
        "threads": sum(found["threads"] for found in table.values()),
        "zombies": [
            {"pid": pid, "name": p["name"], "parent": p["parent"]}
            for pid, p in table.items()
            if p["state"] == "Z"
        ],
        "orphans": _orphans(table, jobs),
        "shared": _unused_shared(table) if linux.LINUX else [],
        "folders": [path for place in [*places, "/dev/shm"] for path in cleanup.abandoned(place)],
        "sessions": _old_sessions(table, places[0]),
    }


def _processes() -> dict[int, dict[str, Any]]:
    table = {}
    for entry in files.listed("/proc"):
        if not entry.isdigit():
            continue
        name, _, rest = files.text(f"/proc/{entry}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) > 17:
            table[int(entry)] = {
                "name": name.partition("(")[2], "state": fields[0], "parent": int(fields[1]),
                "threads": int(fields[17]),
            }  # fmt: skip
    return table


def _jobs(table: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Processes that `ringdance run` has started, each with its job."""
    found = {}
    for pid in table:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                match = _JOB.search(file.read())
        except OSError:
            continue
        if match:
            found[pid] = match[1].decode(errors="replace")
    return found


def _orphans(table: dict[int, dict[str, Any]], jobs: dict[int, str]) -> list[dict[str, Any]]:
    """Those of them of which no ancestor but init is without the job's mark: the launcher has gone."""
    found = []
    for pid, job in jobs.items():
        at = pid
        while jobs.get(at) == job and at in table:
            at = table[at]["parent"]
        if at <= 1:
            found.append({"pid": pid, "name": table[pid]["name"], "job": job})
    return found


def _unused_shared(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Files of this user that no process has open or mapped, of libraries that share memory so.

    None where a container that cannot be seen from here may use the same /dev/shm. A file is given a minute:
    one that was just made is not mapped yet.
    """
    if not linux.sees_all_users_of_shared_memory():
        return []
    candidates = {}
    for name in files.listed("/dev/shm"):
        if _SHARED.match(name):
            try:
                status = os.lstat(f"/dev/shm/{name}")
            except OSError:
                continue
            ours = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
            if ours and time.time() - status.st_mtime > _NEW_S:
                candidates[status.st_ino] = {"name": name, "bytes": status.st_blocks * 512}
    if candidates:
        for pid in table:
            for inode in linux.shared_files(pid):
                candidates.pop(inode, None)
    return list(candidates.values())


def _old_sessions(table: dict[int, dict[str, Any]], base: str) -> list[str]:
    """Folders of this user with such names that have not changed for an hour, and whose process is gone."""
    found = []
    for pattern in _SESSIONS:
        for path in glob.glob(f"{glob.escape(base)}/{pattern}"):
            try:
                status = os.lstat(path)
            except OSError:
                continue
            numbers = {int(text) for text in re.findall(r"\d+", os.path.basename(path))[:6]}
            alive = any(number in table for number in numbers if number > 1)
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and not alive and time.time() - status.st_mtime > _OLD_S:
                found.append(path)
    return found
