"""Folders: whether they can be written, what is free, and whose file system it is. Sizes in bytes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted

NETWORK = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "glusterfs", "ceph", "9p", "fuse.sshfs")


def look(wanted: Wanted) -> dict[str, Any]:
    """Each folder of the request, and the one for temporary files."""
    temporary = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    return {
        "folders": {path: folder(path) for path in wanted.folders},
        "temporary": {"path": temporary, **folder(temporary)},
        "marks": {path: os.path.exists(path) for path in wanted.marks},
    }


def folder(path: str) -> dict[str, Any]:
    """What a folder is like; for one that does not exist, the nearest parent, in which it would be made."""
    there = os.path.abspath(path)
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    found: dict[str, Any] = {"exists": there == os.path.abspath(path), "nearest": there, "error": ""}
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    try:
        room = os.statvfs(there)
    except OSError:
        return found
    found |= {
        "total": room.f_frsize * room.f_blocks,
        "free": room.f_frsize * room.f_bavail,
        "inodes": room.f_files,
        "inodes_free": room.f_favail,
        "no_programs": bool(room.f_flag & getattr(os, "ST_NOEXEC", 0)),
        "kind": files.mounted(there),
    }
    return found
