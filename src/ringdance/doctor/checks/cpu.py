"""Cores, instruction sets, threads."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.compare import odd_ones
from ringdance.doctor.registry import WARNING, Case, Cases, Finding, host_check, hosts_check

_CAPS = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX", "AVX2"),
    "DNNL_MAX_CPU_ISA": ("SSE41", "AVX", "AVX2"),
    "TF_ENABLE_ONEDNN_OPTS": ("0",),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX", "AVX2"),
}
_SPINNING = {"KMP_BLOCKTIME": ("infinite",), "OMP_WAIT_POLICY": ("active",)}


@host_check(
    "cores-allowed",
    "cpu",
    WARNING,
    "cores that this shell may use: a CPU quota (containers) or an affinity mask (taskset, Slurm)",
)
def cores_allowed(case: Case) -> Iterator[Finding]:
    """Affinity and quota."""
    found = case["cpu"]
    cores, affinity, usable = found["cores"], found["affinity"], found["usable"]
    if affinity < cores:
        yield Finding(
            f"this shell may use {affinity} of {cores} cores (affinity mask)",
            "ask for more cores (sbatch --cpus-per-task), or widen the mask: taskset -cp 0-"
            + f"{cores - 1} $$",
        )
    if usable < affinity:
        yield Finding(
            f"the cgroup's quota is {usable} of {affinity} cores; libraries that do not look start "
            f"{affinity} threads and are throttled",
            "ask for more (docker run --cpus, resources.limits.cpu), or: export OMP_NUM_THREADS="
            + str(usable),
        )
    if usable == cores:
        yield Finding(f"all {cores} cores may be used")


@host_check(
    "ranks-per-core",
    "cpu",
    WARNING,
    "more ranks on a host than cores: they take turns, and every exchange waits for the last",
)
def ranks_per_core(case: Case) -> Finding | None:
    """Slots and cores."""
    usable = case["cpu"]["usable"]
    if not case.slots:
        return None
    text = f"{case.slots} ranks on {usable} cores"
    return (
        Finding(text, f"start {usable} ranks or fewer on this host") if case.slots > usable else Finding(text)
    )


@host_check(
    "threads",
    "cpu",
    WARNING,
    "OMP_NUM_THREADS times ranks, compared with the cores",
    needs=("cpu", "environment"),
)
def threads(case: Case) -> Finding:
    """OMP_NUM_THREADS and its like."""
    usable = case["cpu"]["usable"]
    ranks = max(1, case.slots)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        text = case.variable(name).partition(",")[0]
        if text.isdigit() and int(text) * ranks > usable:
            share = max(1, usable // ranks)
            return Finding(
                f"{name}={text} with {ranks} {'rank' if ranks == 1 else 'ranks'} makes "
                f"{int(text) * ranks} computing threads on {usable} cores",
                f"unset {name} (`ringdance run` sets each rank's share), or: export {name}={share}",
            )
    return Finding(
        f"OMP_NUM_THREADS={case.variable('OMP_NUM_THREADS') or '(not set; `ringdance run` sets it)'}"
    )


@host_check(
    "thread-affinity",
    "cpu",
    WARNING,
    "KMP_AFFINITY, GOMP_CPU_AFFINITY, OMP_PLACES: fixed cores put the threads of all ranks on the same ones",
    needs=("environment",),
)
def thread_affinity(case: Case) -> Finding:
    """Affinity that every rank inherits."""
    given = [name for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES") if case.variable(name)]
    kind = case.variable("KMP_AFFINITY")
    if kind and not any(word in kind for word in ("none", "disabled")):
        given.append("KMP_AFFINITY")
    if case.variable("OMP_PROC_BIND").lower() in ("true", "close", "spread", "master", "primary"):
        given.append("OMP_PROC_BIND")
    if not given:
        return Finding("threads are bound to no cores")
    words = ", ".join(f"{name}={case.variable(name)}" for name in given)
    return Finding(f"{words}: each rank binds its threads to the same cores", "unset " + " ".join(given))


@host_check(
    "thread-waiting",
    "cpu",
    WARNING,
    "KMP_BLOCKTIME, OMP_WAIT_POLICY: threads that spin when idle take the cores of other ranks",
    needs=("environment",),
)
def thread_waiting(case: Case) -> Finding:
    """Spinning threads."""
    given = [name for name, bad in _SPINNING.items() if case.variable(name).lower() in bad]
    if not given:
        return Finding("idle threads do not spin for long")
    return Finding(
        f"{several([f'{n}={case.variable(n)}' for n in given])}: idle threads spin",
        "unset " + " ".join(given),
    )


@host_check(
    "machine-busy",
    "cpu",
    WARNING,
    "load of the machine before the job starts: whoever shares a core with a rank slows all ranks",
)
def machine_busy(case: Case) -> Finding:
    """Load."""
    load, cores = case["cpu"]["load"], case["cpu"]["cores"]
    text = f"load {load:.1f} on {cores} cores"
    return (
        Finding(text, "see who computes here, and wait or end it: top -o %CPU")
        if load > 0.5 * cores + 0.5
        else Finding(text)
    )


@host_check(
    "stolen-time", "cpu", WARNING, "time that other virtual machines have taken from this one's cores"
)
def stolen_time(case: Case) -> Finding:
    """Steal."""
    share = case["cpu"]["steal"]
    text = f"{share:.1%} of the cores' time went to other virtual machines"
    return (
        Finding(
            text,
            "use a dedicated or another instance type; burstable ones (t2, t3) do this when their "
            "credits are used up",
        )
        if share > 0.05
        else Finding(text)
    )


@host_check("cpu-governor", "cpu", WARNING, "frequency governor of the cores: powersave costs time")
def governor(case: Case) -> Finding | None:
    """Governor."""
    found = case["cpu"]["governors"]
    if not found:
        return None
    if set(found) & {"powersave", "conservative"}:
        return Finding(
            f"cores run under the governor {', '.join(found)}", "sudo cpupower frequency-set -g performance"
        )
    return Finding(f"frequency governor: {', '.join(found)}")


@host_check(
    "instruction-sets",
    "cpu",
    WARNING,
    "AVX2, AVX-512, AMX: without AVX2 frameworks are slow, or end with 'Illegal instruction'",
    needs=("cpu", "machine"),
)
def instruction_sets(case: Case) -> Finding:
    """What the processor can."""
    found = case["cpu"]["sets"]
    text = f"{case['cpu']['model']}: {', '.join(found) or 'no vector extensions known here'}"
    if case["machine"]["architecture"] == "x86_64" and "avx2" not in found:
        return Finding(
            f"{text}; AVX2 is missing",
            "use another machine; in a virtual machine choose the CPU model `host`",
        )
    return Finding(text)


@host_check(
    "instruction-sets-used",
    "cpu",
    WARNING,
    "variables that forbid frameworks the instruction sets that the processor has",
    needs=("cpu", "environment"),
)
def instruction_sets_used(case: Case) -> Finding:
    """Variables that hold frameworks back."""
    given = [
        name for name, bad in _CAPS.items() if case.variable(name).lower() in [word.lower() for word in bad]
    ]
    if not given:
        return Finding("nothing keeps frameworks from the processor's instruction sets")
    return Finding(
        f"{several([f'{n}={case.variable(n)}' for n in given])} keeps frameworks from what the processor can",
        "unset " + " ".join(given),
    )


@hosts_check(
    "same-processor",
    "cpu",
    WARNING,
    "processors of the hosts: the slowest sets the pace, and sums may differ in the last bit",
)
def same_processor(cases: Cases) -> Iterator[Finding]:
    """Models and instruction sets."""
    values = {h: f"{c['cpu']['model']} with {'/'.join(c['cpu']['sets'])}" for h, c in cases.items()}
    yield from odd_ones(values, "leave odd hosts out (-H), or expect the pace of the slowest")


@hosts_check("same-cores", "cpu", WARNING, "usable cores of the hosts: the host with fewest sets the pace")
def same_cores(cases: Cases) -> Iterator[Finding]:
    """Numbers of cores."""
    values = {h: f"{c['cpu']['usable']} usable cores" for h, c in cases.items()}
    yield from odd_ones(values, "give hosts with fewer cores fewer slots, or leave them out (-H)")
