"""What earlier jobs have left."""

from __future__ import annotations

import shlex
from collections import Counter

from ringdance.tools.checks.sizes import several, size
from ringdance.tools.registry import NOTE, WARNING, Case, Finding, host_check


@host_check("zombies", "leftovers", NOTE, "zombie processes: ended, but their parents have not asked how")
def zombies(case: Case) -> Finding:
    """Zombies."""
    found = case["leftovers"]["zombies"]
    if not found:
        return Finding("no zombie processes")
    parents = Counter(entry["parent"] for entry in found)
    parent, count = parents.most_common(1)[0]
    mend = (
        "start the container with an init: docker run --init, shareProcessNamespace: true"
        if parent == 1
        else f"end their parent: kill {parent}"
    )
    names = several(sorted({entry["name"] for entry in found}))
    return Finding(
        f"zombie processes: {len(found)} ({names}); of these {count} are children of process {parent}", mend
    )


@host_check(
    "orphans",
    "leftovers",
    WARNING,
    "ranks of earlier jobs whose launcher is gone: they hold cores, memory and GPUs",
)
def orphans(case: Case) -> Finding:
    """Living processes of dead jobs."""
    found = case["leftovers"]["orphans"]
    if not found:
        return Finding("no ranks of earlier jobs")
    pids = [str(entry["pid"]) for entry in found]
    return Finding(
        f"{len(found)} processes of earlier jobs still run: "
        f"{several([e['name'] + ' ' + str(e['pid']) for e in found])}",
        "kill -9 " + " ".join(pids[:20]),
    )


@host_check(
    "shared-memory-left",
    "leftovers",
    WARNING,
    "files in /dev/shm that no process uses: memory that is gone until they are removed",
)
def shared_memory_left(case: Case) -> Finding:
    """Segments."""
    found = case["leftovers"]["shared"]
    if not found:
        return Finding("no shared memory is left of earlier jobs")
    names = [entry["name"] for entry in found]
    total = size(sum(entry["bytes"] for entry in found))
    mend = "rm -f " + " ".join(shlex.quote(f"/dev/shm/{name}") for name in names[:20])
    return Finding(
        f"{len(found)} files of earlier jobs hold {total} of /dev/shm: {several(names, 3)}",
        mend,
        NOTE if sum(e["bytes"] for e in found) < 1 << 20 else "",
    )


@host_check("session-folders", "leftovers", NOTE, "folders of earlier jobs' MPI sessions")
def session_folders(case: Case) -> Finding:
    """Folders in TMPDIR."""
    found = case["leftovers"]["folders"]
    if not found:
        return Finding("no folders of earlier jobs")
    return Finding(
        f"{len(found)} folders of earlier jobs: {several(found, 2)}",
        "rm -rf " + " ".join(shlex.quote(path) for path in found[:20]),
    )
