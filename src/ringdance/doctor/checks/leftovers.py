"""What earlier jobs have left."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator

from ringdance.doctor.checks.sizes import several, size
from ringdance.doctor.registry import NOTE, WARNING, Case, Finding, host_check


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
        return Finding("no shared memory that no process uses")
    names = [entry["name"] for entry in found]
    total = size(sum(entry["bytes"] for entry in found))
    return Finding(
        f"{len(found)} files that no process uses hold {total} of /dev/shm: {several(names, 3)}",
        _look_first(f"/dev/shm/{name}" for name in names),
        NOTE if sum(e["bytes"] for e in found) < 1 << 20 else "",
    )


def _look_first(paths: Iterable[str]) -> str:
    """A line for what a name alone tells nothing certain about: another program may need it again."""
    return "remove those of programs that have ended; see when they were made: ls -ld " + shlex.join(
        list(paths)[:20]
    )


@host_check("session-folders", "leftovers", NOTE, "directories of earlier jobs and MPI sessions")
def session_folders(case: Case) -> Iterator[Finding]:
    """Directories in TMPDIR, /tmp and /dev/shm."""
    found, sessions = case["leftovers"]["folders"], case["leftovers"]["sessions"]
    if found:
        text = f"{len(found)} directories that dead jobs of ringdance have left: {several(found, 2)}"
        yield Finding(text, "rm -rf " + shlex.join(found[:20]))
    if sessions:
        text = f"{len(sessions)} directories with names of MPI sessions, an hour old: {several(sessions, 2)}"
        yield Finding(text, _look_first(sessions))
    if not found and not sessions:
        yield Finding("no directories of earlier jobs")
