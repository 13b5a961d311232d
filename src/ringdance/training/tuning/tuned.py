"""The file of a search's result, and whether it fits a job: for ``--tuned FILE``."""

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
"""What a result has, with the least and the largest."""
_OF_JOB = {
    "ranks": "ranks", "hosts": "hosts", "ranks_per_host": "ranks per host", "cores": "cores of the hosts",
    "gradients": "gradients", "bytes": "bytes of the gradients", "digest": "names or shapes of the gradients",
}  # fmt: skip


def hardware_of(hosts: Iterable[str], cores: Iterable[int]) -> dict[str, Any]:
    """Return the hardware that a result belongs to.

    Args:
        hosts: the host of each rank.
        cores: the number of cores of each rank's host.
    """
    ranks = list(zip(hosts, cores, strict=True))
    names = dict(ranks)
    counts = sorted(sum(host == name for host, _ in ranks) for name in names)
    return {
        "ranks": len(ranks), "hosts": len(names), "ranks_per_host": counts, "cores": sorted(names.values()),
    }  # fmt: skip


def model_of(gradients: Mapping[str, tuple[tuple[int, ...], str, int]]) -> dict[str, Any]:
    """Return the model that a result belongs to; ``gradients``: shape, data type and bytes by name."""
    text = json.dumps(sorted((name, *rest[:2]) for name, rest in gradients.items()))
    return {
        "gradients": len(gradients), "bytes": sum(nbytes for _, _, nbytes in gradients.values()),
        "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
    }  # fmt: skip


def write(path: str, job: Mapping[str, Any], values: Mapping[str, float], won: str) -> None:
    """Write a result. Raises OSError."""
    content = {"ringdance_tuned": 1, "job": job, "values": values, "won": won}
    with whole_text(Path(path)) as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def read(path: str) -> dict[str, Any]:
    """Return the content of a result's file.

    Raises:
        ValueError: it cannot be read, or is none; with the reason.
    """
    try:
        found = json.loads(read_regular(Path(path)))
    except LaunchError as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or "ringdance_tuned" not in found:
        raise ValueError(f"{path} was not written by `ringdance run --autotune --autotune-log-file`")
    values: Any = found.get("values")
    if (
        not isinstance(values, dict)
        or not isinstance(found.get("job"), dict)
        or not values.keys() <= VALUES.keys()
    ):
        raise ValueError(f'{path}: "values" must have numbers, of some of {", ".join(VALUES)}')
    for name, value in values.items():
        least, most = VALUES[name]
        if not (isinstance(value, int | float) and least <= value <= most):
            raise ValueError(f"{path}: {name} is {value!r:.40}; expected a number from {least} to {most:.0f}")
    return found


def differences(job: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return in words where a result's job differs from the one that runs here; "" for nowhere."""
    found = list[str]()
    for name, words in _OF_JOB.items():
        if job.get(name) == here[name]:
            continue
        if name == "digest":
            if not found:
                found.append(f"other {words}")
        else:
            found.append(f"{words}: {_text(job.get(name))} in the file, {_text(here[name])} here")
    return "; ".join(found)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
