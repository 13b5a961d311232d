"""Memory and shared memory."""

from __future__ import annotations

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host
from ringdance.doctor.rows import GB, MB, limit, size

_LARGER = {
    "kubernetes": "mount a volume `emptyDir: {medium: Memory}` at /dev/shm",
    "docker": "start the container with --shm-size=8g (or --ipc=host)",
    "podman": "start the container with --shm-size=8g (or --ipc=host)",
    "apptainer": "bind the host's: --bind /dev/shm",
    "": "sudo mount -o remount,size=50% /dev/shm",
}
_FULL = "see what lies there, and remove what no process uses: ls -lhS /dev/shm"
_MOUNT = "sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs /dev/shm"
_FOR_A_RANK = GB
_WINDOW = 64 * MB  # what the engine's window, MPI and a data loader take at least


def _memory_free(host: Host) -> Finding:
    found = host["memory"]
    text = f"{size(found['available'])} of {size(found['total'])} memory are free"
    if found["available"] >= max(_FOR_A_RANK * max(1, host.slots), found["total"] // 20):
        return Finding(text)
    text += f" for {host.slots} ranks" if host.slots else ""
    return Finding(text, "see which processes use it, and end what is not needed: ps aux --sort=-rss | head")


def _memory_limit(host: Host) -> Finding:
    found = host["memory"]
    if found["limit"] is None or found["limit"] >= found["total"]:
        return Finding("no memory limit below the machine's memory")
    text = (
        f"this shell may use {size(found['limit'])} of the machine's {size(found['total'])} memory; "
        "beyond that ranks are killed"
    )
    if found["limit"] >= max(_FOR_A_RANK * max(1, host.slots), found["total"] // 2):
        return Finding(text)
    request = "sbatch --mem=0 (Slurm), docker run --memory, resources.limits.memory (Kubernetes)"
    return Finding(text, f"request more: {request}")


def _shm_there(host: Host) -> Finding | None:
    found = host["memory"]["shm"]
    if not host["machine"]["system"].startswith("Linux"):
        return None
    if not found["exists"]:
        return Finding("there is no /dev/shm: ranks of one host cannot share memory", _MOUNT)
    if found["error"]:
        return Finding(f"/dev/shm cannot be written: {found['error']}", _MOUNT if found["free"] else _FULL)
    if found["kind"] != "tmpfs":
        return Finding("/dev/shm is on a disk, not in memory: shared memory is slow there", _MOUNT, WARNING)
    return Finding("/dev/shm can be written")


def _shm_size(host: Host) -> Finding | None:
    found = host["memory"]["shm"]
    if not found["exists"]:
        return None
    need = max(256 * MB, _WINDOW * host.slots)
    text = f"/dev/shm has {size(found['total'])}"
    if found["total"] >= need:
        return Finding(text)
    return Finding(f"{text}; {size(need)} or more are needed", _LARGER[host["machine"]["container"]])


def _shm_used(host: Host) -> bool:
    found = host["memory"]["shm"]
    need = max(_WINDOW, min(_WINDOW * max(1, host.slots), found["total"]) // 2)
    return bool(found["free"] < need)


CHECKS = (
    Check("memory-free", "memory", WARNING,
          "free memory, at least 1 GiB for each rank and 5% of the machine", _memory_free),
    Check("memory-limit", "memory", WARNING,
          "a cgroup's memory limit below the machine's memory: the kernel kills ranks at it", _memory_limit),
    Check("shm-there", "memory", ERROR,
          "whether /dev/shm exists, is in memory, and can be written", _shm_there, ("memory", "machine")),
    Check("shm-size", "memory", ERROR,
          "size of /dev/shm: containers often have 64 MiB, a data loader then dies with 'Bus error'",
          _shm_size, ("memory", "machine")),
    Check("shm-free", "memory", ERROR,
          "free space of /dev/shm: a full one ends ranks with 'Bus error' (SIGBUS)",
          limit("{memory[shm][free]!b} of {memory[shm][total]!b} of /dev/shm are free", _shm_used, _FULL,
                applies=lambda host: host["memory"]["shm"]["exists"])),
)  # fmt: skip
