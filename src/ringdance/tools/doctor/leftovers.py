"""What earlier jobs have left: ranks without a launcher."""

from __future__ import annotations

from typing import Any

import psutil

from ringdance.host.system import linux
from ringdance.launch.hosts import several
from ringdance.tools.doctor.check import WARNING, Check, Finding, Host, Usage

# --- facts -----------------------------------------------------------------------------------------


def leftovers_facts(usage: Usage) -> dict[str, Any]:
    """Return living ranks whose launcher has ended."""
    return {"orphans": _find_orphans({p.pid: p.info for p in psutil.process_iter(["ppid", "name"])})}


def _find_orphans(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return processes of a job whose first ancestor without the job's marker is init."""
    jobs = {pid: marked.job for pid, marked in linux.marked_processes().items()}
    found = []
    for pid, job in jobs.items():
        ancestor = pid
        while jobs.get(ancestor) == job and ancestor in table:
            ancestor = table[ancestor]["ppid"]
        if ancestor <= 1:
            found.append({"pid": pid, "name": table[pid]["name"], "job": job})
    return found


# --- checks ----------------------------------------------------------------------------------------


def _orphans(host: Host) -> Finding:
    found = host["leftovers"]["orphans"]
    if not found:
        return Finding("no ranks of earlier jobs")
    named = several([f"{entry['name']} {entry['pid']}" for entry in found])
    return Finding(
        f"{len(found)} processes of earlier jobs still run: {named}",
        "kill -9 " + " ".join(str(entry["pid"]) for entry in found[:20]),
    )


CHECKS = (
    Check("orphans", "leftovers", WARNING,
          "ranks of earlier jobs whose launcher has ended: they hold cores, memory and GPUs", _orphans),
)  # fmt: skip
