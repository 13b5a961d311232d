"""Variables of the shell."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Finding, host_check

_OFF = ("", "0", "no", "off", "false", "info", "warn", "version", "detail_off")
_SLOWING = (
    "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "TORCH_USE_CUDA_DSA", "JAX_DISABLE_JIT",
    "JAX_DEBUG_NANS", "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHONASYNCIODEBUG", "NCCL_DEBUG", "MALLOC_CHECK_",
    "PYTHONPROFILEIMPORTTIME",
)  # fmt: skip
_NCCL_OFF = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@host_check(
    "unknown-settings",
    "environment",
    WARNING,
    "names that begin with RINGDANCE_ or HOROVOD_ and are no settings, or have no effect",
)
def unknown_settings(case: Case) -> Iterator[Finding]:
    """What ``init()`` would warn of."""
    notes = case["environment"]["notes"]
    for note in notes:
        yield Finding(note.rstrip("."), "correct or unset it; all names: ringdance settings")
    if not notes:
        yield Finding("all settings in the environment are known")


@host_check(
    "setting-values", "environment", ERROR, "settings with values that cannot be used: init() raises an error"
)
def setting_values(case: Case) -> Finding:
    """What ``init()`` would raise."""
    error = case["environment"]["setting_error"]
    if not error:
        return Finding("the values of all settings can be used")
    return Finding(error.partition(" (")[0].rstrip("."), f"unset {error.partition('=')[0]}")


@host_check(
    "debug-switches",
    "environment",
    WARNING,
    "variables for debugging that were left on and slow everything down",
)
def debug_switches(case: Case) -> Finding:
    """CUDA_LAUNCH_BLOCKING and its like."""
    given = [name for name in _SLOWING if case.variable(name).lower() not in _OFF]
    if not given:
        return Finding("no debugging is switched on")
    return Finding(
        f"{several([f'{n}={case.variable(n)}' for n in given])} slows training down",
        "unset " + " ".join(given),
    )


@host_check(
    "nccl-switched-off",
    "environment",
    WARNING,
    "variables that keep NCCL from its fast ways",
    needs=("environment",),
)
def nccl_switched_off(case: Case) -> Finding | None:
    """NCCL_P2P_DISABLE and its like."""
    given = [name for name in _NCCL_OFF if case.variable(name) not in ("", "0")]
    if not given:
        return None
    return Finding(
        f"{several([f'{n}={case.variable(n)}' for n in given])} keeps NCCL from a faster way",
        "unset " + " ".join(given),
    )


@host_check(
    "preloaded-libraries",
    "environment",
    WARNING,
    "LD_PRELOAD with files that do not exist: every process prints an error",
)
def preloaded_libraries(case: Case) -> Finding:
    """LD_PRELOAD."""
    missing = case["environment"]["preload_missing"]
    if missing:
        return Finding(
            f"LD_PRELOAD names what does not exist: {several(missing)}",
            "unset LD_PRELOAD, or install the library",
        )
    return Finding(
        f"LD_PRELOAD={case.variable('LD_PRELOAD')}"
        if case.variable("LD_PRELOAD")
        else "LD_PRELOAD is not set"
    )


@host_check(
    "duplicate-openmp",
    "environment",
    WARNING,
    "KMP_DUPLICATE_LIB_OK, which hides that two OpenMP libraries are loaded: wrong results and crashes",
)
def duplicate_openmp(case: Case) -> Finding | None:
    """Two OpenMP libraries."""
    value = case.variable("KMP_DUPLICATE_LIB_OK")
    if value.lower() not in ("1", "true", "yes", "on"):
        return None
    return Finding(
        f"KMP_DUPLICATE_LIB_OK={value} hides that two OpenMP libraries are loaded",
        "unset KMP_DUPLICATE_LIB_OK, and install frameworks from one source (all pip or all conda)",
    )


@host_check(
    "proxies",
    "environment",
    WARNING,
    "proxy variables without no_proxy: gRPC (TensorFlow, JAX) asks the proxy for other hosts and hangs",
)
def proxies(case: Case) -> Finding:
    """http_proxy and its like."""
    given = case["environment"]["proxies"]
    if not given:
        return Finding("no proxy is set")
    listed = (case.variable("no_proxy") or case.variable("NO_PROXY")).split(",")
    entries = {entry.strip().lstrip(".").lower() for entry in listed} - {""}
    hosts = case.wanted.hosts or ("localhost",)
    missing = [host for host in hosts if not _excepted(host.lower(), entries)]
    if not missing:
        return Finding(f"{', '.join(given)} set, with no_proxy for the hosts")
    return Finding(
        f"{', '.join(given)} set, and no_proxy does not name {several(missing)}",
        f"export no_proxy=localhost,127.0.0.1,{','.join(hosts)}"
        if case.wanted.hosts
        else "export no_proxy=localhost,127.0.0.1",
    )


def _excepted(host: str, entries: set[str]) -> bool:
    return "*" in entries or any(host == entry or host.endswith(f".{entry}") for entry in entries)


@host_check(
    "tf-config",
    "environment",
    WARNING,
    "TF_CONFIG, by which TensorFlow takes the process for a member of another cluster",
)
def tf_config(case: Case) -> Finding | None:
    """TF_CONFIG."""
    if not case.variable("TF_CONFIG"):
        return None
    return Finding(
        "TF_CONFIG is set: TensorFlow waits for the other members of that cluster", "unset TF_CONFIG"
    )


@host_check(
    "visible-devices",
    "environment",
    WARNING,
    "CUDA_VISIBLE_DEVICES that hides GPUs from all ranks, or names some that are not there",
    needs=("environment", "gpu"),
)
def visible_devices(case: Case) -> Finding | None:
    """CUDA_VISIBLE_DEVICES."""
    value = case["environment"]["variables"].get("CUDA_VISIBLE_DEVICES")
    count = len(case["gpu"]["gpus"]) or case["gpu"]["devices"]
    if value is None:
        return None
    numbers = [word.strip() for word in value.split(",")]
    if any(word.isdigit() and int(word) >= count for word in numbers):
        return Finding(
            f"CUDA_VISIBLE_DEVICES={value}, but this host has {count} GPUs", "unset CUDA_VISIBLE_DEVICES"
        )
    if count and len(numbers) < count:
        return Finding(
            f"CUDA_VISIBLE_DEVICES={value} hides {count - len(numbers)} of {count} GPUs",
            "unset CUDA_VISIBLE_DEVICES",
            NOTE,
        )
    return Finding(f"CUDA_VISIBLE_DEVICES={value}")
