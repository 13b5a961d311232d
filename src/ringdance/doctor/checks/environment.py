"""Variables of the shell."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.check import ERROR, NOTE, WARNING, Check, Finding, Host
from ringdance.doctor.rows import several, variables


def _unknown_settings(host: Host) -> Iterator[Finding]:
    for note in host["environment"]["notes"]:
        yield Finding(note.rstrip("."), "correct or unset it; all names: ringdance settings")


def _setting_values(host: Host) -> Finding:
    error = host["environment"]["setting_error"]
    if not error:
        return Finding("the values of all settings are valid")
    return Finding(error.partition(" (")[0].rstrip("."), f"unset {error.partition('=')[0]}")


def _proxies(host: Host) -> Finding:
    given = ", ".join(host["environment"]["proxies"])
    if not given:
        return Finding("no proxy is set")
    listed = (host.variable("no_proxy") or host.variable("NO_PROXY")).split(",")
    entries = {entry.strip().lstrip(".").lower() for entry in listed} - {""}
    hosts = host.usage.hosts or ("localhost",)
    ends = tuple(f".{entry}" for entry in entries)  # a.b is excepted by b
    missing = [] if "*" in entries else [name for name in hosts if not f".{name.lower()}".endswith(ends)]
    if not missing:
        return Finding(f"{given} set, with no_proxy for the hosts")
    names = ",".join(dict.fromkeys(("localhost", "127.0.0.1", *host.usage.hosts)))
    return Finding(f"{given} set, and no_proxy does not name {several(missing)}", f"export no_proxy={names}")


def _visible_devices(host: Host) -> Finding | None:
    value = host.variable("CUDA_VISIBLE_DEVICES")
    if not value:
        return None
    count = host["gpu"]["count"] or host["gpu"]["devices"]
    text, fix = f"CUDA_VISIBLE_DEVICES={value}", "unset CUDA_VISIBLE_DEVICES"
    numbers = [word.strip() for word in value.split(",")]
    if any(word.isdigit() and int(word) >= count for word in numbers):
        return Finding(f"{text}, but this host has {count} GPUs", fix)
    if count and len(numbers) < count:
        return Finding(f"{text} hides {count - len(numbers)} of {count} GPUs", fix, NOTE)
    return Finding(text)


CHECKS = (
    Check("unknown-settings", "environment", WARNING,
          "names that begin with RINGDANCE_ or HOROVOD_ and are no settings, or have no effect",
          _unknown_settings),
    Check("setting-values", "environment", ERROR,
          "settings with invalid values: init() raises an error", _setting_values),
    Check("duplicate-openmp", "environment", WARNING,
          "KMP_DUPLICATE_LIB_OK, which hides that two OpenMP libraries are loaded: wrong results and "
          "crashes",
          variables({"KMP_DUPLICATE_LIB_OK": "1|true|yes|on"},
                    " hides that two OpenMP libraries are loaded",
                    ", and install frameworks from one source (all pip or all conda)")),
    Check("proxies", "environment", WARNING,
          "proxy variables without no_proxy: gRPC (TensorFlow, JAX) asks the proxy for other hosts and "
          "hangs", _proxies),
    Check("tf-config", "environment", WARNING,
          "TF_CONFIG, which makes TensorFlow wait for the members of another cluster",
          variables({"TF_CONFIG": ".+"}, " is set: TensorFlow waits for the other members of that cluster")),
    Check("visible-devices", "environment", WARNING,
          "CUDA_VISIBLE_DEVICES that hides GPUs from all ranks, or names some that do not exist",
          _visible_devices, ("environment", "gpu")),
)  # fmt: skip
