"""What Slurm says in the environment of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringdance.errors import LaunchError


def expand(text: str) -> list[str]:
    """The names in a Slurm list of nodes: ``"a[01-03,7],b"`` gives a01, a02, a03, a7, b.

    Raises:
        LaunchError: it cannot be understood.
    """
    if text.count("[") != text.count("]"):
        raise LaunchError(f"SLURM_JOB_NODELIST={text}: a bracket is not closed")
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        found += _expand_one(part.strip(), text)
    return found


def _expand_one(part: str, text: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            raise LaunchError(f"SLURM_JOB_NODELIST={text}: {piece!r} is not a range of numbers")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    return [before + number + tail for number in numbers for tail in _expand_one(after, text)]


def counts(text: str) -> list[int]:
    """A Slurm list of numbers for each node: ``"2(x3),1"`` gives 2, 2, 2, 1.

    Raises:
        LaunchError: it cannot be understood.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"{text!r} is not Slurm's form of a number for each node, such as 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def hosts(environ: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """Hosts and slots of the Slurm allocation that this process is in; None outside of one.

    A slot is a task; where the job says nothing of tasks, one for each GPU, else one for each node.

    Raises:
        LaunchError: what Slurm says cannot be understood.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes or not (environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")):
        return None
    names = expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") if "SLURM_NTASKS" in environ else None
    tasks = tasks or environ.get("SLURM_NTASKS_PER_NODE")
    if tasks:
        each = counts(tasks)
        each = each * len(names) if len(each) == 1 else each
    else:
        gpus = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        each = [int(gpus) if gpus.isdigit() and int(gpus) else 1] * len(names)
    if len(each) != len(names):
        raise LaunchError(
            f"Slurm names {len(names)} nodes ({nodes}), but numbers of tasks for {len(each)} ({tasks}). "
            "Give the hosts with -H"
        )
    return list(zip(names, each, strict=True))
