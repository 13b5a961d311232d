"""Directories for logs, checkpoints and temporary files."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from typing import Any

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.probes.disk import NETWORK
from ringdance.doctor.rows import GB, limit, size

_LONGEST = 60  # a socket's address has 108 bytes, and MPI's session directories take about 45 of them


_REMOVE = "see what uses it, and remove that: du -xh {} | sort -h | tail"
_FIXES = {
    os.strerror(errno.EACCES): "choose another directory, or: sudo chown $USER {}",
    os.strerror(errno.ENOSPC): f"choose another disk, or {_REMOVE}",
    os.strerror(errno.EDQUOT): f"see your quota (quota -s); {_REMOVE}",
    os.strerror(errno.EROFS): "choose another directory; this disk is mounted for reading: findmnt -T {}",
}


def _writable(host: Host) -> Iterator[Finding]:
    for path, found in host["disk"]["directories"].items():
        if found["error"]:
            fix = _FIXES.get(found["error"], "choose another directory; this one: ls -ld {}")
            text = f"{path} cannot be written: {found['error']}"
            yield Finding(text, fix.format(shlex.quote(found["nearest"])))


def _space(path: str, found: dict[str, Any], need: int) -> Iterator[Finding]:
    """Judge free space: `need` suffices, and 5% of a disk, but not 5% of a tiny one."""
    if "free" in found:
        enough = found["free"] >= min(need, max(found["total"] // 20, need // 4))
        text = f"{path}: {size(found['free'])} of {size(found['total'])} are free"
        yield Finding(text, "" if enough else _REMOVE.format(shlex.quote(found["nearest"])))


def _folder_exists(host: Host) -> Iterator[Finding]:
    for path, found in host["disk"]["directories"].items():
        if not found["exists"]:
            text = f"{path} does not exist: a job would make it in {found['nearest']}"
            yield Finding(text, f"mkdir -p {shlex.quote(path)}, or mount its disk")


def _folder_space(host: Host) -> Iterator[Finding]:
    for path, found in host["disk"]["directories"].items():
        yield from _space(path, found, 10 * GB)


def _temporary_space(host: Host) -> Iterator[Finding]:
    temporary = host["disk"]["temporary"]
    return _space(temporary["path"], temporary, GB)


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
    Check("folder-space", "disk", WARNING, "10 GiB or 5% free in the directories of --folder", _folder_space),
    Check("temporary-folder", "disk", ERROR,
          "whether the directory for temporary files (TMPDIR) exists and can be written", _temporary),
    Check("temporary-space", "disk", WARNING,
          "free space for temporary files, 1 GiB: compilers and frameworks unpack there", _temporary_space),
    Check("temporary-path-length", "disk", ERROR,
          "length of TMPDIR: MPI's sockets are made there, and a socket's path may have 108 bytes",
          limit("TMPDIR={disk[temporary][path]}",
                lambda host: len(host["disk"]["temporary"]["path"].encode()) > _LONGEST,
                "export TMPDIR=/tmp",
                problem=f"TMPDIR has more than {_LONGEST} bytes, so MPI's sockets may not fit: "
                        "{disk[temporary][path]}")),
    Check("temporary-programs", "disk", WARNING,
          "TMPDIR mounted noexec: compiled kernels (Triton, XLA, torch.compile) cannot be loaded from there",
          limit("programs can run from {disk[temporary][path]}",
                lambda host: host["disk"]["temporary"].get("noexec"),
                "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
                problem="{disk[temporary][path]} is mounted noexec: what compilers put there cannot be "
                        "loaded")),
    Check("temporary-local", "disk", WARNING,
          "TMPDIR on a network disk: MPI's session files are slow there, and hosts overwrite each other's",
          limit("temporary files are on {disk[temporary][kind]}",
                lambda host: host["disk"]["temporary"]["kind"] in NETWORK,
                "export TMPDIR=/tmp",
                problem="{disk[temporary][path]} is on a network disk ({disk[temporary][kind]})",
                applies=lambda host: host["disk"]["temporary"].get("kind"))),
)  # fmt: skip
