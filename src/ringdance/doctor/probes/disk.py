"""Directories: whether they can be written, free space, file system. Sizes in bytes."""

from __future__ import annotations

import os
from typing import Any

import psutil

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.launch.directories import bases
from ringdance.launch.system import linux, machine

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "glusterfs", "ceph", "9p", "fuse.sshfs")


def collect(usage: Usage) -> dict[str, Any]:
    """Each directory of the usage, and the one for temporary files."""
    temporary = bases(os.environ)[0]
    return {
        "directories": {path: directory(path) for path in usage.directories},
        "temporary": {"path": temporary, **directory(temporary)},
    }


def directory(path: str) -> dict[str, Any]:
    """Describe a directory; for one that does not exist, the nearest parent, in which it would be made."""
    wanted = os.path.abspath(path)
    nearest = machine.nearest(wanted)
    found = {"exists": nearest == wanted, "nearest": nearest, "error": files.write_error(nearest)}
    try:
        room, flags = linux.room(nearest), os.statvfs(nearest).f_flag
    except OSError:
        return found
    noexec = bool(flags & getattr(os, "ST_NOEXEC", 0))
    return found | room | {"noexec": noexec, "kind": mounted(nearest)}


def mounted(path: str) -> str:
    """Return the type of the file system that holds `path`; "" if it is not known."""
    best, kind = "", ""
    for entry in psutil.disk_partitions(all=True):
        point = entry.mountpoint
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of several at one mount point the last is on top
            best, kind = point, entry.fstype
    return kind
