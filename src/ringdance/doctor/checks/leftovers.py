"""What earlier jobs have left."""

from __future__ import annotations

import shlex

from ringdance.doctor.check import NOTE, WARNING, Check, Finding, Host
from ringdance.doctor.rows import MB, several, size


def _orphans(host: Host) -> Finding:
    found = host["leftovers"]["orphans"]
    if not found:
        return Finding("no ranks of earlier jobs")
    named = several([f"{entry['name']} {entry['pid']}" for entry in found])
    return Finding(
        f"{len(found)} processes of earlier jobs still run: {named}",
        "kill -9 " + " ".join(str(entry["pid"]) for entry in found[:20]),
    )


def _shared_memory_left(host: Host) -> Finding:
    found = host["leftovers"]["shared"]
    if not found:
        return Finding("no unused files in /dev/shm")
    names = [entry["name"] for entry in found]
    total = sum(entry["bytes"] for entry in found)
    # No `rm`: a name does not prove which program made it, and that may need it again.
    paths = shlex.join(f"/dev/shm/{name}" for name in names[:20])
    return Finding(
        f"{len(found)} files that no process uses hold {size(total)} of /dev/shm: {several(names, 3)}",
        f"remove those of programs that have ended; see when they were made: ls -ld {paths}",
        NOTE if total < MB else "",
    )


CHECKS = (
    Check("orphans", "leftovers", WARNING,
          "ranks of earlier jobs whose launcher has ended: they hold cores, memory and GPUs", _orphans),
    Check("shared-memory-left", "leftovers", WARNING,
          "files in /dev/shm that no process uses: they take memory until they are removed",
          _shared_memory_left),
)  # fmt: skip
