"""Check for ranks left behind by earlier jobs."""

from __future__ import annotations

from typing import Any

import psutil

from ringdance.host.system import linux
from ringdance.launch.hosts import several
from ringdance.tools.doctor.check import WARNING, Check, Finding, HostFacts, Usage

# --- facts -----------------------------------------------------------------------------------------


def leftovers_facts(usage: Usage) -> dict[str, Any]:
    """Collect the ranks that are still running although their launcher has exited."""
    return {"orphans": _find_orphans({p.pid: p.info for p in psutil.process_iter(["ppid", "name"])})}


def _find_orphans(table: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return processes with a job's marker whose nearest ancestor without the same marker is init."""
    jobs = linux.marked_processes()
    orphans = []
    for pid, job in jobs.items():
        ancestor = pid
        while jobs.get(ancestor) == job and ancestor in table:
            ancestor = table[ancestor]["ppid"]
        if ancestor <= 1:
            orphans.append({"pid": pid, "name": table[pid]["name"], "job": job})
    return orphans


# --- checks ----------------------------------------------------------------------------------------


def _orphans(host: HostFacts) -> Finding:
    orphans = host["leftovers"]["orphans"]
    if not orphans:
        return Finding("no ranks from earlier jobs")
    named = several([f"{entry['name']} {entry['pid']}" for entry in orphans])
    return Finding(
        f"still running from earlier jobs: {named}",
        "kill -9 " + " ".join(str(entry["pid"]) for entry in orphans[:20]),
    )


CHECKS = (
    Check("orphans", "leftovers", WARNING,
          "no ranks should be left from earlier jobs whose launcher has exited, because they occupy "
          "cores, memory and GPUs", _orphans),
)  # fmt: skip
