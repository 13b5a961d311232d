"""Check a host's operating system, environment, cores, memory and resource limits.

Sizes are in bytes. Imports only the standard library.
"""

from __future__ import annotations

import glob
import os
import resource
from typing import Any

from ringdance.host.limits import cgroups, usable_cores
from ringdance.host.system import linux
from ringdance.launch.hosts import counted
from ringdance.tools.doctor.check import ERROR, WARNING, Check, Finding, HostFacts, Usage, equal, limit, size
from ringdance.tools.doctor.disk import directory_facts

_MB, _GB = 1 << 20, 1 << 30
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
INTERFACES = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_prte_if_include", "HOROVOD_GLOO_IFACE",
)  # fmt: skip
MPI_PREFIXES = ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")
MPI_LIBRARIES = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")
# No other environment variables are reported, because they may contain secrets.
_VARIABLES = (*_THREADS, *INTERFACES, *MPI_PREFIXES, *MPI_LIBRARIES, "CUDA_VISIBLE_DEVICES")
_LARGER = {
    "kubernetes": "mount a volume `emptyDir: {medium: Memory}` at /dev/shm",
    "docker": "start the container with --shm-size=8g (or --ipc=host)",
    "podman": "start the container with --shm-size=8g (or --ipc=host)",
    "apptainer": "bind the host's /dev/shm: --bind /dev/shm",
    "": "sudo mount -o remount,size=50% /dev/shm",
}
_FULL = "remove files that no process uses: ls -lhS /dev/shm"
_MOUNT = "sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs /dev/shm"
_FOR_A_RANK = _GB
_WINDOW = 64 * _MB  # /dev/shm space that each rank needs for the engine's window, MPI and a data loader

# --- facts -----------------------------------------------------------------------------------------


def machine_facts(usage: Usage) -> dict[str, Any]:
    """Collect facts about the operating system, the container, and the directory the command will run in."""
    system = os.uname()
    return {
        "system": f"{system.sysname} {system.release}",
        "architecture": system.machine,
        "container": container(),
        "cwd": {"path": usage.cwd, "exists": not usage.cwd or os.path.isdir(usage.cwd)},
    }


def container() -> str:
    """Return the container type: "kubernetes", "docker", "podman", "apptainer", or "" outside a container."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    return "docker" if os.path.exists("/.dockerenv") else ""


def environment_facts(usage: Usage) -> dict[str, str]:
    """Collect the variables in ``_VARIABLES``, as a script started by this process would see them."""
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


def cpu_facts(usage: Usage) -> dict[str, Any]:
    """Collect the number of usable cores, as limited by the affinity mask and the cgroup's CPU quota."""
    return {"usable": usable_cores()}


def memory_facts(usage: Usage) -> dict[str, Any]:
    """Collect the total memory, the lowest cgroup limit (None if unlimited), and facts about /dev/shm."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [linux.text(f"{path}/{name}") for path in cgroups("memory") for name in names]
    # Skip the values that mean "no limit": "max" in cgroup v2, and a huge number in cgroup v1.
    limits = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"total": total, "limit": min(limits, default=None), "shm": directory_facts("/dev/shm")}


def limits_facts(usage: Usage) -> dict[str, Any]:
    """Collect this process's soft limits (None if unlimited) and whether the host has InfiniBand.

    InfiniBand requires a sufficiently high limit on locked memory.
    """
    facts: dict[str, Any] = {"infiniband": bool(glob.glob("/sys/class/infiniband/*"))}
    for name, constant in (("memlock", resource.RLIMIT_MEMLOCK), ("address", resource.RLIMIT_AS)):
        soft = resource.getrlimit(constant)[0]
        facts[name] = None if soft == resource.RLIM_INFINITY else soft
    return facts


# --- checks ----------------------------------------------------------------------------------------


def _threads(host: HostFacts) -> Finding:
    usable, ranks = host["cpu"]["usable"], max(1, host.slots)
    for name in _THREADS:
        text = host.variable(name).partition(",")[0]
        if text.isdigit() and int(text) * ranks > usable:
            return Finding(
                f"{name}={text} with {counted(ranks, 'rank')} starts {int(text) * ranks} compute threads on "
                f"{counted(usable, 'core')}",
                f"unset {name} (`ringdance run` sets each rank's share), or: "
                f"export {name}={max(1, usable // ranks)}",
            )
    value = host.variable("OMP_NUM_THREADS")
    return Finding(f"OMP_NUM_THREADS={value or '(not set; `ringdance run` sets it)'}")


def _memory_limit(host: HostFacts) -> Finding:
    memory = host["memory"]
    if memory["limit"] is None or memory["limit"] >= memory["total"]:
        return Finding("no memory limit below the machine's memory")
    text = (
        f"this shell is limited to {size(memory['limit'])} of the machine's {size(memory['total'])} of "
        "memory, and ranks that exceed the limit are killed"
    )
    if memory["limit"] >= max(_FOR_A_RANK * max(1, host.slots), memory["total"] // 2):
        return Finding(text)
    request = "sbatch --mem=0 (Slurm), docker run --memory, resources.limits.memory (Kubernetes)"
    return Finding(text, f"request more memory: {request}")


def _shm_there(host: HostFacts) -> Finding | None:
    shm = host["memory"]["shm"]
    if not host["machine"]["system"].startswith("Linux"):
        return None
    if not shm["exists"]:
        return Finding("there is no /dev/shm: ranks on one host cannot share memory", _MOUNT)
    if shm["error"]:
        return Finding(f"/dev/shm is not writable: {shm['error']}", _MOUNT if shm["free"] else _FULL)
    return Finding("/dev/shm is writable")


def _shm_size(host: HostFacts) -> Finding | None:
    shm = host["memory"]["shm"]
    if not shm["exists"]:
        return None
    need = max(256 * _MB, _WINDOW * host.slots)
    text = f"/dev/shm has {size(shm['total'])}"
    if shm["total"] >= need:
        return Finding(text)
    return Finding(f"{text}, but the ranks need at least {size(need)}", _LARGER[host["machine"]["container"]])


def _shm_used(host: HostFacts) -> bool:
    shm = host["memory"]["shm"]
    need = max(_WINDOW, min(_WINDOW * max(1, host.slots), shm["total"]) // 2)
    return bool(shm["free"] < need)


CHECKS = (
    Check("reached", "hosts", ERROR,
          "ssh must reach each host without prompting and find this Python and ringdance there, and each "
          "host must be a separate machine",
          limit("reached", lambda host: host["reach"]["error"], "{reach[fix]}", problem="{reach[error]}",
                applies=lambda host: not host["reach"].get("local")), ("reach",)),
    Check("working-folder", "hosts", ERROR,
          "the directory in which the command will run must exist on all hosts",
          limit("{machine[cwd][path]} exists",
                lambda host: not host["machine"]["cwd"]["exists"],
                "put the directory on a shared disk, or copy it to the same path on this host",
                problem="{machine[cwd][path]} does not exist",
                applies=lambda host: host["machine"]["cwd"]["path"]), ("machine",)),
    Check("same-system", "hosts", ERROR, "all hosts must have the same processor architecture",
          equal(lambda host: {"architecture": host["machine"]["architecture"]},
                "start the job on hosts that have the same architecture"), ("machine",), compares=True),
    Check("ranks-per-core", "cpu", WARNING,
          "a host should not have more ranks than cores, because ranks would take turns and every "
          "exchange waits for the slowest", limit("{slots:rank} on {cpu[usable]:core}",
                lambda host: host.slots > host["cpu"]["usable"],
                "start at most {cpu[usable]:rank} on this host",
                applies=lambda host: host.slots)),
    Check("threads", "cpu", WARNING,
          "there should not be more threads (OMP_NUM_THREADS times ranks) than cores",
          _threads, ("cpu", "environment")),
    Check("memory-limit", "memory", WARNING,
          "the cgroup memory limit should not be below the machine's memory, because the kernel kills "
          "ranks that exceed the limit", _memory_limit),
    Check("shm-there", "memory", ERROR,
          "/dev/shm must exist and be writable", _shm_there, ("memory", "machine")),
    Check("shm-size", "memory", ERROR,
          "/dev/shm must be large enough: containers often have 64 MiB, and data loaders die with 'Bus "
          "error'", _shm_size, ("memory", "machine")),
    Check("shm-free", "memory", ERROR,
          "/dev/shm must have free space: if it is full, ranks die with 'Bus error' (SIGBUS)",
          limit("/dev/shm has {memory[shm][free]:size} of {memory[shm][total]:size} free", _shm_used, _FULL,
                applies=lambda host: host["memory"]["shm"]["exists"])),
    Check("limit-locked-memory", "limits", ERROR,
          "the limit on locked memory must be high enough: InfiniBand and NCCL must pin buffers, or "
          "MPI_Init fails (Cannot allocate memory)", limit("locked memory: {limits[memlock]:size}",
                lambda host: host["limits"]["memlock"] is not None and host["limits"]["memlock"] < _GB,
                "ulimit -l unlimited; permanently in /etc/security/limits.conf (or, for slurmd and dockerd, "
                "systemd's DefaultLimitMEMLOCK)",
                problem="this host has InfiniBand, but a process may lock only {limits[memlock]:size}",
                applies=lambda host: host["limits"]["infiniband"])),
    Check("limit-address-space", "limits", ERROR,
          "the address space must not be limited, because CUDA and shared memory reserve far more of it "
          "than they use",
          limit("address space: {limits[address]:size}", lambda host: host["limits"]["address"] is not None,
                "ulimit -v unlimited",
                problem="the address space is limited to {limits[address]:size}, but frameworks reserve more "
                        "of it than they use")),
)  # fmt: skip
