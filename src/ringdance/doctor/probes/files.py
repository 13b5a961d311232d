"""What several probes share."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from ringdance.launch.system import linux
from ringdance.limits import cgroups

run = linux.run


def write_error(directory: str) -> str:
    """Return why no file can be written in `directory`, or ""."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def last_line(output: str) -> str:
    """Return the last line of a program's output that is not empty."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def cgroup_limit(controller: str, names: Sequence[str]) -> int | None:
    """Return the lowest number in the files `names` of this process's cgroups of a controller, or None.

    Words such as ``max``, and v1's number for "no limit", do not count.
    """
    values = [linux.text(f"{path}/{name}") for path in cgroups(controller) for name in names]
    return min((int(value) for value in values if value.isdigit() and int(value) < 1 << 60), default=None)
