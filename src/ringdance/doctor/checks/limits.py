"""Limits of the user's processes (``ulimit``)."""

from __future__ import annotations

import math

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.rows import GB, limit

_PERMANENT = (
    "and permanently in /etc/security/limits.conf (or DefaultLimit... of systemd, for slurmd and dockerd)"
)


def _open_files(host: Host) -> Finding:
    soft, hard = host["limits"]["files"]
    need = max(1024, 64 * host.slots)
    if soft is None or soft >= need:
        return Finding(f"a process may open {soft or 'any number of'} files")
    if hard is None or hard >= need:
        fix = f"ulimit -n {max(need, 65536)}"
    else:
        fix = f"ulimit -n {hard} (the hard limit; more: ask the administrator)"
    return Finding(f"a process may open {soft} files only; {need} are needed", fix)


def _processes(host: Host) -> Finding:
    soft, pids = host["limits"]["processes"][0], host["limits"]["pids_limit"]
    need = 512 + 4 * host["cpu"]["cores"] * max(1, host.slots) + host["leftovers"]["threads"]
    if soft is not None and soft < need:
        return Finding(
            f"the user may have {soft} processes and threads; about {need} are needed",
            f"ulimit -u {2 * need}, {_PERMANENT}",
        )
    if pids is not None and pids < need:
        return Finding(
            f"the cgroup of this shell may have {pids} processes and threads; about {need} are needed",
            "docker run --pids-limit=-1; Kubernetes: podPidsLimit of the kubelet; systemd: TasksMax=infinity",
        )
    return Finding(f"processes and threads: {'no limit' if soft is None else soft}")


def _below(host: Host, name: str, need: float = math.inf) -> bool:
    soft = host["limits"][name][0]
    return soft is not None and soft < need


CHECKS = (
    Check("limit-open-files", "limits", WARNING,
          "open files: each pair of ranks and each data loader takes some; 'Too many open files'",
          _open_files),
    Check("limit-locked-memory", "limits", ERROR,
          "locked memory: InfiniBand and NCCL must pin buffers; 'Cannot allocate memory' in MPI_Init",
          limit("locked memory: {limits[memlock][0]!b}",
                lambda host: host["network"]["infiniband"] and _below(host, "memlock", GB),
                f"ulimit -l unlimited, {_PERMANENT}",
                problem="a process may lock {limits[memlock][0]!b} only, and this host has InfiniBand"),
          ("limits", "network")),
    Check("limit-processes", "limits", WARNING,
          "processes and threads of the user: 'Resource temporarily unavailable' when threads start",
          _processes, ("limits", "cpu", "leftovers")),
    Check("limit-address-space", "limits", ERROR,
          "address space: CUDA and shared memory reserve far more than they use",
          limit("address space: {limits[address][0]!b}", lambda host: _below(host, "address"),
                "ulimit -v unlimited",
                problem="address space: {limits[address][0]!b} only; frameworks reserve more than they use")),
)  # fmt: skip
