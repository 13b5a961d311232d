"""Memory and shared memory."""

from __future__ import annotations

from ringdance.doctor.checks.sizes import GB, MB, size
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Finding, host_check

_LARGER = {
    "kubernetes": "mount a volume `emptyDir: {medium: Memory}` at /dev/shm",
    "docker": "start the container with --shm-size=8g (or --ipc=host)",
    "podman": "start the container with --shm-size=8g (or --ipc=host)",
    "apptainer": "bind the host's: --bind /dev/shm",
    "": "sudo mount -o remount,size=50% /dev/shm",
}
_FOR_A_RANK = GB
_WINDOW = 64 * MB  # what the engine's window, MPI and a data loader take at least


@host_check(
    "memory-free", "memory", WARNING, "free memory, at least 1 GiB for each rank and 5% of the machine"
)
def memory_free(case: Case) -> Finding | None:
    """Free memory."""
    found = case["memory"]
    if found["available"] is None:
        return None
    need = max(_FOR_A_RANK * max(1, case.slots), found["total"] // 20)
    text = f"{size(found['available'])} of {size(found['total'])} memory are free"
    if found["available"] >= need:
        return Finding(text)
    ranks = f" for {case.slots} ranks" if case.slots else ""
    return Finding(
        f"{text}{ranks}", "see who holds it, and end what is no longer needed: ps aux --sort=-rss | head"
    )


@host_check("memory-limit", "memory", WARNING, "a cgroup's memory limit below the machine's memory")
def memory_limit(case: Case) -> Finding | None:
    """The kernel kills ranks at the cgroup's limit, whatever `free` shows."""
    found = case["memory"]
    if found["limit"] is None or found["limit"] >= found["total"]:
        return Finding("no memory limit below the machine's memory")
    text = (
        f"this shell may use {size(found['limit'])} of the machine's {size(found['total'])} memory; "
        "beyond that ranks are killed"
    )
    need = _FOR_A_RANK * max(1, case.slots)
    if found["limit"] >= max(need, found["total"] // 2):
        return Finding(text)
    return Finding(
        text,
        "ask for more: sbatch --mem=0 (Slurm), docker run --memory, resources.limits.memory (Kubernetes)",
    )


@host_check("swap", "memory", WARNING, "swap in use: a rank that is swapped out makes all others wait")
def swap(case: Case) -> Finding:
    """Swap in use."""
    found = case["memory"]
    used = found["swap_used"]
    if used <= max(256 * MB, found["total"] // 100):
        return Finding("no swap in use" if not used else f"{size(used)} of swap in use")
    return Finding(
        f"{size(used)} of swap are in use", "free memory, then empty it: sudo swapoff -a && sudo swapon -a"
    )


@host_check(
    "killed-for-memory",
    "memory",
    NOTE,
    "processes that the kernel has killed for lack of memory since it started",
)
def killed_for_memory(case: Case) -> Finding:
    """Kills by the out-of-memory killer."""
    count = case["memory"]["killed"]
    if not count:
        return Finding("no process was killed for lack of memory")
    return Finding(
        f"{count} processes were killed for lack of memory since the machine started",
        "see which: sudo dmesg -T | grep -i 'killed process'",
    )


@host_check(
    "overcommit",
    "memory",
    WARNING,
    "vm.overcommit_memory=2: forks of large processes fail with 'Cannot allocate memory'",
)
def overcommit(case: Case) -> Finding | None:
    """Strict accounting of memory."""
    mode = case["memory"]["overcommit"]
    if mode is None:
        return None
    if mode != 2:
        return Finding(f"vm.overcommit_memory is {mode}")
    return Finding(
        "vm.overcommit_memory is 2: data loaders and CUDA may fail to reserve memory that is free",
        "sudo sysctl vm.overcommit_memory=0",
    )


@host_check(
    "huge-pages-reserved", "memory", WARNING, "memory set aside as huge pages, which nothing else can use"
)
def huge_pages_reserved(case: Case) -> Finding:
    """Static huge pages that lie idle."""
    found = case["memory"]
    idle = found["huge_pages_free"]
    if idle <= found["total"] // 10:
        return Finding(
            f"{size(found['huge_pages'])} reserved as huge pages"
            if found["huge_pages"]
            else "no memory is reserved as huge pages"
        )
    return Finding(
        f"{size(idle)} are reserved as huge pages and unused; no rank can have them",
        "sudo sysctl vm.nr_hugepages=0",
    )


@host_check(
    "transparent-huge-pages",
    "memory",
    NOTE,
    "transparent huge pages switched off: large arrays cost more time",
)
def transparent_huge_pages(case: Case) -> Finding | None:
    """Transparent huge pages."""
    mode = case["memory"]["transparent"]
    if not mode:
        return None
    if mode != "never":
        return Finding(f"transparent huge pages: {mode}")
    return Finding(
        "transparent huge pages are switched off",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


@host_check(
    "shm-there",
    "memory",
    ERROR,
    "whether /dev/shm is there, in memory, and can be written",
    needs=("memory", "machine"),
)
def shm_there(case: Case) -> Finding | None:
    """/dev/shm itself."""
    found = case["memory"]["shm"]
    if not case["machine"]["system"].startswith("Linux"):
        return None
    mount = "sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs /dev/shm"
    if not found["exists"]:
        return Finding("there is no /dev/shm: ranks of one host cannot share memory", mount)
    if found["error"]:
        return Finding(
            f"nothing can be written to /dev/shm: {found['error']}",
            _full(case) if found["free"] == 0 else mount,
        )
    if not found["memory"]:
        return Finding("/dev/shm lies on a disk, not in memory: shared memory is slow there", mount, WARNING)
    return Finding("/dev/shm can be written")


def _full(case: Case) -> str:
    return "see what lies there, and remove what no process uses: ls -lhS /dev/shm"


@host_check(
    "shm-size",
    "memory",
    ERROR,
    "size of /dev/shm: containers often have 64 MiB, a data loader then dies with 'Bus error'",
    needs=("memory", "machine"),
)
def shm_size(case: Case) -> Finding | None:
    """Total size of /dev/shm."""
    found = case["memory"]["shm"]
    if not found["exists"]:
        return None
    need = max(256 * MB, _WINDOW * case.slots)
    text = f"/dev/shm has {size(found['total'])}"
    if found["total"] >= need:
        return Finding(text)
    return Finding(f"{text}; {size(need)} or more are needed", _LARGER[case["machine"]["container"]])


@host_check(
    "shm-free", "memory", ERROR, "free space of /dev/shm: a full one ends ranks with 'Bus error' (SIGBUS)"
)
def shm_free(case: Case) -> Finding | None:
    """Free space of /dev/shm."""
    found = case["memory"]["shm"]
    if not found["exists"]:
        return None
    need = max(_WINDOW, min(_WINDOW * max(1, case.slots), found["total"]) // 2)
    text = f"{size(found['free'])} of {size(found['total'])} of /dev/shm are free"
    return Finding(text) if found["free"] >= need else Finding(text, _full(case))
