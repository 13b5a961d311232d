"""Variables of the shell."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.check import ERROR, NOTE, WARNING, Check, Finding, Host


def _unknown_settings(host: Host) -> Iterator[Finding]:
    for note in host["environment"]["notes"]:
        yield Finding(note.rstrip("."), "correct or unset it; all names: ringdance settings")


def _setting_values(host: Host) -> Finding:
    error = host["environment"]["setting_error"]
    if not error:
        return Finding("the values of all settings are valid")
    return Finding(error.partition(" (")[0].rstrip("."), f"unset {error.partition('=')[0]}")


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
    Check("visible-devices", "environment", WARNING,
          "CUDA_VISIBLE_DEVICES that hides GPUs from all ranks, or names some that do not exist",
          _visible_devices, ("environment", "gpu")),
)  # fmt: skip
