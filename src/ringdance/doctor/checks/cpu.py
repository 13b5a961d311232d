"""Cores and threads."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.check import WARNING, Check, Finding, Host
from ringdance.doctor.rows import limit


def _cores_allowed(host: Host) -> Iterator[Finding]:
    cores, affinity, usable = (host["cpu"][name] for name in ("cores", "affinity", "usable"))
    if affinity < cores:
        yield Finding(
            f"this shell may use {affinity} of {cores} cores (affinity mask)",
            f"request more cores (sbatch --cpus-per-task), or widen the mask: taskset -cp 0-{cores - 1} $$",
        )
    if usable < affinity:
        yield Finding(
            f"the cgroup's quota is {usable} of {affinity} cores; libraries that ignore it start "
            f"{affinity} threads and are throttled",
            f"request more (docker run --cpus, resources.limits.cpu), or: export OMP_NUM_THREADS={usable}",
        )


def _threads(host: Host) -> Finding:
    usable, ranks = host["cpu"]["usable"], max(1, host.slots)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        text = host.variable(name).partition(",")[0]
        if text.isdigit() and int(text) * ranks > usable:
            return Finding(
                f"{name}={text} with {ranks} {'rank' if ranks == 1 else 'ranks'} makes "
                f"{int(text) * ranks} computing threads on {usable} cores",
                f"unset {name} (`ringdance run` sets each rank's share), or: "
                f"export {name}={max(1, usable // ranks)}",
            )
    given = host.variable("OMP_NUM_THREADS")
    return Finding(f"OMP_NUM_THREADS={given or '(not set; `ringdance run` sets it)'}")


CHECKS = (
    Check("cores-allowed", "cpu", WARNING,
          "cores that this shell may use: a CPU quota (containers) or an affinity mask (taskset, Slurm)",
          _cores_allowed),
    Check("ranks-per-core", "cpu", WARNING,
          "more ranks on a host than cores: they take turns, and every exchange waits for the last",
          limit("{slots} ranks on {cpu[usable]} cores",
                lambda host: host.slots > host["cpu"]["usable"],
                "start {cpu[usable]} ranks or fewer on this host",
                applies=lambda host: host.slots)),
    Check("threads", "cpu", WARNING,
          "OMP_NUM_THREADS times ranks, compared with the cores", _threads, ("cpu", "environment")),
)  # fmt: skip
