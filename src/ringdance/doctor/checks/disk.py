"""Folders for logs, checkpoints and temporary files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from ringdance.doctor.checks.sizes import GB, several, size
from ringdance.doctor.probes.disk import NETWORK
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Cases, Finding, host_check, hosts_check

_LONGEST = 60  # a socket's address has 108 bytes, and MPI's session folders take about 45 of them


@host_check(
    "folder-writable", "disk", ERROR, "whether the folders for logs and checkpoints (--folder) can be written"
)
def folder_writable(case: Case) -> Iterator[Finding]:
    """Folders of the request."""
    for path, found in case["disk"]["folders"].items():
        if not found["error"]:
            yield Finding(f"{path} can be written" if found["exists"] else f"{path} can be made")
        else:
            yield Finding(
                f"{path} cannot be written: {found['error']}",
                f"choose another folder, or: sudo chown $USER {shlex.quote(found['nearest'])}",
            )


@host_check(
    "folder-space", "disk", WARNING, "free space in the folders for logs and checkpoints: 10 GiB or 5%"
)
def folder_space(case: Case) -> Iterator[Finding]:
    """Free space."""
    for path, found in case["disk"]["folders"].items():
        yield from _space(path, found, 10 * GB)


def _space(path: str, found: dict[str, Any], need: int) -> Iterator[Finding]:
    if "free" in found:
        text = f"{path}: {size(found['free'])} of {size(found['total'])} are free"
        # 5% of a disk suffices, but not 5% of a tiny one.
        if found["free"] >= need or found["free"] >= max(found["total"] // 20, need // 4):
            yield Finding(text)
        else:
            place = shlex.quote(found["nearest"])
            yield Finding(text, f"see what takes it, and remove it: du -xh {place} | sort -h | tail")


@host_check("inodes", "disk", WARNING, "free inodes: 'No space left on device' on a disk that has space")
def inodes(case: Case) -> Iterator[Finding]:
    """Free inodes of all folders, that for temporary files included."""
    temporary = case["disk"]["temporary"]
    for path, found in {**case["disk"]["folders"], temporary["path"]: temporary}.items():
        if found.get("inodes"):
            text = f"{path}: {found['inodes_free']} of {found['inodes']} inodes are free"
            bad = found["inodes_free"] < min(10_000, found["inodes"] // 20)
            yield Finding(
                text,
                "remove small files; see where they are: du --inodes -x "
                + shlex.quote(found["nearest"])
                + " | sort -n | tail"
                if bad
                else "",
            )


@host_check(
    "temporary-folder",
    "disk",
    ERROR,
    "whether the folder for temporary files (TMPDIR) is there and can be written",
)
def temporary_folder(case: Case) -> Finding:
    """TMPDIR."""
    found = case["disk"]["temporary"]
    path = found["path"]
    if not found["exists"]:
        return Finding(f"TMPDIR={path} does not exist", f"mkdir -p {shlex.quote(path)}, or: unset TMPDIR")
    if found["error"]:
        return Finding(
            f"{path} cannot be written: {found['error']}",
            "export TMPDIR=/var/tmp, or another folder that can be written",
        )
    return Finding(f"temporary files go to {path}")


@host_check(
    "temporary-space",
    "disk",
    WARNING,
    "free space for temporary files, 1 GiB: compilers and frameworks unpack there",
)
def temporary_space(case: Case) -> Iterator[Finding]:
    """Free space of TMPDIR."""
    yield from _space(case["disk"]["temporary"]["path"], case["disk"]["temporary"], GB)


@host_check(
    "temporary-path-length",
    "disk",
    ERROR,
    "length of TMPDIR: MPI's sockets lie there, and a socket's path may have 108 bytes",
)
def temporary_path_length(case: Case) -> Finding:
    """Unix sockets have short names."""
    path = case["disk"]["temporary"]["path"]
    if len(path.encode()) <= _LONGEST:
        return Finding(f"TMPDIR has {len(path.encode())} bytes")
    return Finding(
        f"TMPDIR has {len(path.encode())} bytes; with more than {_LONGEST} MPI's sockets may not fit: {path}",
        "export TMPDIR=/tmp",
    )


@host_check(
    "temporary-programs",
    "disk",
    WARNING,
    "TMPDIR mounted noexec: compiled kernels (Triton, XLA, torch.compile) cannot be loaded from there",
)
def temporary_programs(case: Case) -> Finding:
    """noexec."""
    found = case["disk"]["temporary"]
    if not found.get("no_programs"):
        return Finding("programs can run from the folder for temporary files")
    return Finding(
        f"{found['path']} is mounted noexec: what compilers put there cannot be loaded",
        "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
    )


@host_check(
    "temporary-local",
    "disk",
    WARNING,
    "TMPDIR on a network disk: MPI's session files are slow there, and hosts get in each other's way",
)
def temporary_local(case: Case) -> Finding | None:
    """Network file systems."""
    found = case["disk"]["temporary"]
    kind = found.get("kind", "")
    if kind not in NETWORK:
        return Finding(f"temporary files are on {kind}") if kind else None
    return Finding(f"{found['path']} is on a network disk ({kind})", "export TMPDIR=/tmp")


@hosts_check(
    "folder-shared",
    "disk",
    NOTE,
    "whether all hosts see the same folders for logs and checkpoints (--folder)",
)
def folder_shared(cases: Cases) -> Iterator[Finding]:
    """Files that the leader wrote, seen by the others."""
    for mark in dict.fromkeys(mark for case in cases.values() for mark in case["disk"]["marks"]):
        path = mark.rpartition("/")[0]
        blind = tuple(host for host, case in cases.items() if not case["disk"]["marks"].get(mark))
        if not blind:
            yield Finding(f"{path} is the same on all hosts")
        else:
            yield Finding(
                f"{path} is another folder on {several(blind)} than here",
                "fine if rank 0 alone writes and reads there; else choose a folder on a shared "
                "disk", hosts=blind,
            )  # fmt: skip
