"""Directories for logs, checkpoints and temporary files. Sizes in bytes; standard library only."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

from ringdance.host.directories import bases
from ringdance.host.system import linux, machine
from ringdance.tools.doctor.check import ERROR, WARNING, Check, Finding, Host, Usage, limit

_LONGEST = 60  # a socket's address has 108 bytes, and MPI's session directories take about 45 of them
_REMOVE = "see what uses it, and remove that: du -xh {} | sort -h | tail"
_FIXES = {
    os.strerror(errno.EACCES): "choose another directory, or: sudo chown $USER {}",
    os.strerror(errno.ENOSPC): f"choose another disk, or {_REMOVE}",
    os.strerror(errno.EDQUOT): f"see your quota (quota -s); {_REMOVE}",
    os.strerror(errno.EROFS): "choose another directory; this disk is mounted for reading: findmnt -T {}",
}

# --- facts -----------------------------------------------------------------------------------------


def disk_facts(usage: Usage) -> dict[str, Any]:
    """Each directory of the usage, and the one for temporary files."""
    temporary = bases(os.environ)[0]
    return {
        "directories": {path: directory_facts(path) for path in usage.directories},
        "temporary": {"path": temporary, **directory_facts(temporary)},
    }


def directory_facts(path: str) -> dict[str, Any]:
    """Describe a directory; for one that does not exist, the nearest parent, in which it would be made."""
    wanted = os.path.abspath(path)
    nearest = machine.nearest(wanted)
    found = {"exists": nearest == wanted, "nearest": nearest, "error": _write_error(nearest)}
    try:
        return found | linux.room(nearest)
    except OSError:
        return found


def _write_error(directory: str) -> str:
    """Return why no file can be written in `directory`, or ""."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# --- checks ----------------------------------------------------------------------------------------


def _writable(host: Host) -> Iterator[Finding]:
    for path, found in host["disk"]["directories"].items():
        if found["error"]:
            fix = _FIXES.get(found["error"], "choose another directory; this one: ls -ld {}")
            text = f"{path} cannot be written: {found['error']}"
            yield Finding(text, fix.format(shlex.quote(found["nearest"])))


def _folder_exists(host: Host) -> Iterator[Finding]:
    for path, found in host["disk"]["directories"].items():
        if not found["exists"]:
            text = f"{path} does not exist: a job would make it in {found['nearest']}"
            yield Finding(text, f"mkdir -p {shlex.quote(path)}, or mount its disk")


def _temporary(host: Host) -> Finding:
    found = host["disk"]["temporary"]
    path = found["path"]
    if not found["exists"]:
        return Finding(f"TMPDIR={path} does not exist", f"mkdir -p {shlex.quote(path)}, or: unset TMPDIR")
    if found["error"]:
        return Finding(
            f"{path} cannot be written: {found['error']}",
            "export TMPDIR=/var/tmp, or another directory that can be written",
        )
    return Finding(f"temporary files go to {path}")


CHECKS = (
    Check("folder-writable", "disk", ERROR,
          "whether the directories for logs and checkpoints (--folder) can be written", _writable),
    Check("folder-exists", "disk", WARNING, "whether the directories of --folder exist", _folder_exists),
    Check("temporary-folder", "disk", ERROR,
          "whether the directory for temporary files (TMPDIR) exists and can be written", _temporary),
    Check("temporary-path-length", "disk", ERROR,
          "length of TMPDIR: MPI's sockets are made there, and a socket's path may have 108 bytes",
          limit("TMPDIR={disk[temporary][path]}",
                lambda host: len(host["disk"]["temporary"]["path"].encode()) > _LONGEST,
                "export TMPDIR=/tmp",
                problem=f"TMPDIR has more than {_LONGEST} bytes, so MPI's sockets may not fit: "
                        "{disk[temporary][path]}")),
)  # fmt: skip
