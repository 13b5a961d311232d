"""Limits of the user's processes (``ulimit``)."""

from __future__ import annotations

from ringdance.doctor.checks.sizes import GB, MB, size
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Finding, host_check

_FOREVER = (
    "and for good in /etc/security/limits.conf (or DefaultLimit... of systemd, which slurmd and dockerd need)"
)


@host_check(
    "limit-open-files",
    "limits",
    WARNING,
    "open files: each pair of ranks and each data loader takes some; 'Too many open files'",
)
def open_files(case: Case) -> Finding:
    """``ulimit -n``."""
    soft, hard = case["limits"]["files"]
    need = max(1024, 64 * case.slots)
    if soft is None or soft >= need:
        return Finding(f"open files: {soft or 'no limit'}")
    allowed = "" if hard is None or hard >= need else f" (the hard limit is {hard}: ask who runs the machine)"
    return Finding(
        f"a process may open {soft} files only",
        f"ulimit -n {max(need, 65536) if not allowed else hard}{allowed}",
    )


@host_check(
    "limit-locked-memory",
    "limits",
    ERROR,
    "locked memory: InfiniBand and NCCL must pin buffers; 'Cannot allocate memory' in MPI_Init",
    needs=("limits", "network"),
)
def locked_memory(case: Case) -> Finding:
    """``ulimit -l``."""
    soft, _ = case["limits"]["memlock"]
    if soft is None or soft >= GB:
        return Finding(f"locked memory: {'no limit' if soft is None else size(soft)}")
    if not case["network"]["infiniband"]:
        return Finding(f"locked memory: {size(soft)} (no device here that needs more)")
    return Finding(
        f"a process may lock {size(soft)} only, and this host has InfiniBand",
        f"ulimit -l unlimited, {_FOREVER}",
    )


@host_check(
    "limit-processes",
    "limits",
    WARNING,
    "processes and threads of the user: 'Resource temporarily unavailable' when threads start",
    needs=("limits", "cpu", "leftovers"),
)
def processes(case: Case) -> Finding:
    """``ulimit -u`` and the cgroup's limit of processes."""
    soft, pids = case["limits"]["processes"][0], case["limits"]["pids_limit"]
    need = 512 + 4 * case["cpu"]["cores"] * max(1, case.slots) + case["leftovers"]["threads"]
    if soft is not None and soft < need:
        return Finding(
            f"the user may have {soft} processes and threads; about {need} are needed",
            f"ulimit -u {2 * need}, {_FOREVER}",
        )
    if pids is not None and pids < need:
        return Finding(
            f"the cgroup of this shell may have {pids} processes and threads; about {need} are needed",
            "docker run --pids-limit=-1; Kubernetes: podPidsLimit of the kubelet; systemd: TasksMax=infinity",
        )
    return Finding(f"processes and threads: {'no limit' if soft is None else soft}")


@host_check(
    "limit-stack",
    "limits",
    WARNING,
    "stack: small ones end compiled code with SIGSEGV, unlimited ones give threads 2 MiB only",
)
def stack(case: Case) -> Finding:
    """``ulimit -s``."""
    soft, _ = case["limits"]["stack"]
    if soft is None:
        return Finding(
            "the stack has no limit: threads then get 2 MiB each, which some compiled code overruns",
            "ulimit -s 8192",
            NOTE,
        )
    if soft < 2 * MB:
        return Finding(f"the stack may have {size(soft)} only", "ulimit -s 8192")
    return Finding(f"stack: {size(soft)}")


@host_check(
    "limit-core-dumps",
    "limits",
    NOTE,
    "core dumps: N ranks that crash may write N times their memory into the working folder",
    needs=("limits",),
)
def core_dumps(case: Case) -> Finding:
    """``ulimit -c`` and where dumps go."""
    soft, _ = case["limits"]["core"]
    pattern = case["limits"]["core_pattern"]
    if soft is not None and soft < GB:
        return Finding(f"core dumps: {size(soft) if soft else 'none'}")
    if pattern.startswith("|"):
        return Finding("core dumps go to a program of the system")
    return Finding(f"each rank that crashes writes its whole memory to {pattern or 'core'}", "ulimit -c 0")


@host_check(
    "limit-address-space",
    "limits",
    ERROR,
    "address space: CUDA and shared memory reserve far more than they use",
)
def address_space(case: Case) -> Finding:
    """``ulimit -v``."""
    soft, _ = case["limits"]["address"]
    if soft is None:
        return Finding("address space: no limit")
    return Finding(
        f"a process may have {size(soft)} of addresses; frameworks reserve more than they use",
        "ulimit -v unlimited",
    )


@host_check(
    "limit-file-size",
    "limits",
    ERROR,
    "size of files: a checkpoint that grows beyond it ends the rank with SIGXFSZ",
)
def file_size(case: Case) -> Finding:
    """``ulimit -f``."""
    soft, _ = case["limits"]["file_size"]
    if soft is None:
        return Finding("size of files: no limit")
    return Finding(
        f"a file may have {size(soft)} only; a larger checkpoint ends its rank", "ulimit -f unlimited"
    )


@host_check(
    "limit-cpu-time", "limits", ERROR, "CPU time: login nodes kill processes after some minutes of it"
)
def cpu_time(case: Case) -> Finding:
    """``ulimit -t``."""
    soft, _ = case["limits"]["cpu_time"]
    if soft is None:
        return Finding("CPU time: no limit")
    return Finding(
        f"a process is killed after {soft} s of CPU time, as on a login node",
        "run on a compute node (salloc, sbatch), or: ulimit -t unlimited",
    )
