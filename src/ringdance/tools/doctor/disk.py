"""Check the directories to which logs, checkpoints and temporary files are written.

Sizes are in bytes. Uses only the standard library.
"""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

from ringdance.host.directories import bases
from ringdance.host.system import linux, machine
from ringdance.tools.doctor.check import ERROR, WARNING, Check, Finding, HostFacts, Usage, limit

# A Unix socket path is limited to 108 bytes, of which MPI's session directories use about 45.
_LONGEST = 60
_REMOVE = "remove large files, which you can find with: du -xh {} | sort -h | tail"
_FIXES = {
    os.strerror(errno.EACCES): "choose another directory, or: sudo chown $USER {}",
    os.strerror(errno.ENOSPC): f"choose another disk, or {_REMOVE}",
    os.strerror(errno.EDQUOT): f"check your quota (quota -s); {_REMOVE}",
    os.strerror(errno.EROFS): "choose another directory; this disk is mounted read-only: findmnt -T {}",
}

# --- facts -----------------------------------------------------------------------------------------


def disk_facts(usage: Usage) -> dict[str, Any]:
    """Collect facts about the directories in ``usage.directories`` and the directory for temporary files."""
    temporary = bases(os.environ)[0]
    return {
        "directories": {path: directory_facts(path) for path in usage.directories},
        "temporary": {"path": temporary, **directory_facts(temporary)},
    }


def directory_facts(path: str) -> dict[str, Any]:
    """Collect facts about a directory, or about its nearest existing ancestor if it does not exist."""
    wanted = os.path.abspath(path)
    nearest = machine.nearest(wanted)
    facts = {"exists": nearest == wanted, "nearest": nearest, "error": _write_error(nearest)}
    try:
        return facts | linux.room(nearest)
    except OSError:
        return facts


def _write_error(directory: str) -> str:
    """Try to write a file to ``directory``. Return the error message, or "" if writing succeeds."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# --- checks ----------------------------------------------------------------------------------------


def _writable(host: HostFacts) -> Iterator[Finding]:
    for path, facts in host["disk"]["directories"].items():
        if facts["error"]:
            fix = _FIXES.get(facts["error"], "choose another directory, or check this one: ls -ld {}")
            text = f"{path} is not writable: {facts['error']}"
            yield Finding(text, fix.format(shlex.quote(facts["nearest"])))


def _folder_exists(host: HostFacts) -> Iterator[Finding]:
    for path, facts in host["disk"]["directories"].items():
        if not facts["exists"]:
            text = f"{path} does not exist, so a job would create it in {facts['nearest']}"
            yield Finding(text, f"mkdir -p {shlex.quote(path)}, or mount the disk that contains it")


def _temporary(host: HostFacts) -> Finding:
    facts = host["disk"]["temporary"]
    path = facts["path"]
    if not facts["exists"]:
        return Finding(f"TMPDIR={path} does not exist", f"mkdir -p {shlex.quote(path)}, or: unset TMPDIR")
    if facts["error"]:
        return Finding(
            f"{path} is not writable: {facts['error']}",
            "export TMPDIR=/var/tmp, or another writable directory",
        )
    return Finding(f"temporary files are written to {path}")


CHECKS = (
    Check("folder-writable", "disk", ERROR,
          "the directories for logs and checkpoints (--folder) must be writable", _writable),
    Check("folder-exists", "disk", WARNING, "the directories given by --folder should exist", _folder_exists),
    Check("temporary-folder", "disk", ERROR,
          "the directory for temporary files (TMPDIR) must exist and be writable", _temporary),
    Check("temporary-path-length", "disk", ERROR,
          "TMPDIR must be short, because MPI's sockets are created there and a socket's path may have "
          "at most 108 bytes", limit("TMPDIR={disk[temporary][path]}",
                lambda host: len(host["disk"]["temporary"]["path"].encode()) > _LONGEST,
                "export TMPDIR=/tmp",
                problem=f"TMPDIR is longer than {_LONGEST} bytes, so paths of MPI's sockets in it may be too "
                        "long: {disk[temporary][path]}")),
)  # fmt: skip
