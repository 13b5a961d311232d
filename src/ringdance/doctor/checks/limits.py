"""Limits of the user's processes (``ulimit``)."""

from __future__ import annotations

from collections.abc import Callable

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.rows import GB, MB, limit, size

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


def _below(host: Host, name: str, need: int) -> bool:
    soft = host["limits"][name][0]
    return soft is not None and soft < need


def _unlimited(name: str, what: str, effect: str, fix: str) -> Callable[[Host], Finding]:
    """Judge a limit that should not be set."""

    def judge(host: Host) -> Finding:
        soft = host["limits"][name][0]
        if soft is None:
            return Finding(f"{what}: no limit")
        value = f"{soft} s" if name == "cpu_time" else size(soft)
        return Finding(f"{what}: {value} only; {effect}", fix)

    return judge


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
    Check("limit-stack", "limits", WARNING, "stack: small ones end compiled code with SIGSEGV",
          limit("the stack may have {limits[stack][0]!b}",
                lambda host: _below(host, "stack", 2 * MB),
                "ulimit -s 8192")),
    Check("limit-address-space", "limits", ERROR,
          "address space: CUDA and shared memory reserve far more than they use",
          _unlimited("address",
                     "address space",
                     "frameworks reserve more than they use",
                     "ulimit -v unlimited")),
    Check("limit-file-size", "limits", ERROR,
          "size of files: a checkpoint that grows beyond it ends the rank with SIGXFSZ",
          _unlimited("file_size", "size of files", "a larger checkpoint ends its rank",
                     "ulimit -f unlimited")),
    Check("limit-cpu-time", "limits", ERROR, "CPU time: login nodes kill processes after some minutes of it",
          _unlimited("cpu_time",
                     "CPU time",
                     "then a process is killed, as on a login node",
                     "run on a compute node (salloc, sbatch), or: ulimit -t unlimited")),
)  # fmt: skip
