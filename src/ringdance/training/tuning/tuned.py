"""Read and write the file for ``--tuned FILE``: the result of a search, and the job that it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.files import read_regular, whole_text

VALUES = {
    **dict.fromkeys(("fusion_threshold", "chunk_bytes", "wire_bytes"), (0, 1 << 40)), "cycle_time": (0, 1e6),
    "hierarchical": (0, 1), "overlap": (0, 1), "threads": (1, 1024),
}  # fmt: skip
"""Values that a result can contain, with their minimum and maximum."""
_OF_JOB = {
    "ranks": "ranks", "hosts": "hosts", "ranks_per_host": "ranks per host", "cores": "cores of the hosts",
    "gradients": "gradients", "bytes": "bytes of the gradients",
}  # fmt: skip


def hardware_of(hosts: Iterable[str], cores: Iterable[int]) -> dict[str, Any]:
    """Return a description of the hardware that a result belongs to.

    Args:
        hosts: Host of each rank.
        cores: Core count of each rank's host.
    """
    ranks = list(zip(hosts, cores, strict=True))
    names = dict(ranks)
    counts = sorted(sum(host == name for host, _ in ranks) for name in names)
    return {
        "ranks": len(ranks), "hosts": len(names), "ranks_per_host": counts, "cores": sorted(names.values()),
    }  # fmt: skip


def model_of(gradients: Mapping[str, tuple[tuple[int, ...], str, int]]) -> dict[str, Any]:
    """Describe the model that a result belongs to. ``gradients``: shape, dtype and size in bytes, by name."""
    text = json.dumps(sorted((name, *rest[:2]) for name, rest in gradients.items()))
    return {
        "gradients": len(gradients), "bytes": sum(nbytes for _, _, nbytes in gradients.values()),
        "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    }  # fmt: skip


def write(path: str, job: Mapping[str, Any], values: Mapping[str, float], won: str) -> None:
    """Write a result file. Raises OSError."""
    content = {"ringdance_tuned": 1, "job": job, "values": values, "won": won}
    with whole_text(Path(path)) as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def read(path: str) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: The file cannot be read or is not a result file. The message gives the reason.
    """
    try:
        content = json.loads(read_regular(Path(path)))
    except LaunchError as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or "ringdance_tuned" not in content:
        raise ValueError(f"{path} was not written by `ringdance run --autotune --autotune-log-file`")
    job, values = content.get("job"), content.get("values")
    if not (isinstance(job, dict) and isinstance(values, dict) and values.keys() <= VALUES.keys()):
        raise ValueError(f'{path} must have objects "job" and "values" (with keys {", ".join(VALUES)})')
    for name, value in values.items():
        least, most = VALUES[name]
        if not (isinstance(value, int | float) and least <= value <= most):
            raise ValueError(f"{path}: {name} is {value!r:.40}, expected a number from {least} to {most:.0f}")
    return content


def differences(job: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe how a result's job differs from the running job. Returns an empty string if it does not."""
    reasons = [
        f"{words}: {_text(job.get(name))} in the file, {_text(here[name])} here"
        for name, words in _OF_JOB.items() if job.get(name) != here[name]
    ]
    if not reasons and job.get("digest") != here["digest"]:
        return "different names or shapes of the gradients"
    return "; ".join(reasons)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
