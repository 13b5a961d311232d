"""Detect the hosts of a Slurm job, and start processes on them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache

from ringdance.errors import LaunchError
from ringdance.host.schedulers.allocation import Allocation

STAYS = "SLURM_.*|SLURMD_.*|SBATCH_.*"
"""Pattern for the names of variables that describe a single process. They are not forwarded."""

# srun reads these variables as options for the job's tasks or for a terminal. They do not apply to the
# agent's step, which is one task on one node.
_OF_A_STEP = re.compile(
    r"S(LURM|RUN)_(\w+_PER_(CORE|CPU|GPU|SOCKET|TASK|TRES)|GPUS|(GPU|TRES)_BIND|DISTRIBUTION|EXACT|EXCLUSIVE"
    r"|HINT|LABELIO|STD\w+MODE|UNBUFFEREDIO)"
)
_asking = threading.Lock()


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the nodes and their tasks from Slurm's variables.

    Each task is a slot. If the number of tasks is not set, each GPU is a slot. Without GPUs, each node is
    a slot.

    Raises:
        LaunchError: Slurm's variables cannot be parsed.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not nodes or not job:
        return None
    names = expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE") if "SLURM_NTASKS" in environ else None
    tasks = tasks or environ.get("SLURM_NTASKS_PER_NODE")
    if tasks:
        slots = counts(tasks)
        slots = slots * len(names) if len(slots) == 1 else slots
    else:
        gpus = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        slots = [int(gpus) if gpus.isdigit() and int(gpus) else 1] * len(names)
    if len(slots) != len(names):
        raise LaunchError(
            f"Slurm's variables list {len(names)} nodes ({nodes}), but task counts for {len(slots)} "
            f"nodes ({tasks}). Pass the hosts with -H."
        )
    method = "srun" if shutil.which("srun", path=environ.get("PATH")) else "ssh"
    # salloc's shell does not have SLURM_PROCID. A step, for which the user requested tasks from srun, also
    # has SLURM_STEP_NUM_TASKS.
    batch = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    hosts = list(zip(names, slots, strict=True))
    return Allocation(hosts, f"Slurm job {job}", method, unattended=batch)


def step(host: str, program: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the srun command that runs ``program`` once on a node with all of the job's resources there.

    The caller must remove the variables returned by ``of_a_step`` from srun's environment.
    """
    line = [
        "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mpi=none", "--cpu-bind=none",
        "--mem=0", "--kill-on-bad-exit=0", "--quiet",
    ]  # fmt: skip
    # By default, a step gets all GPUs only if they were requested per node. Otherwise it gets one task's
    # GPUs, or srun fails.
    by_task = re.search("GPU|TRES", " ".join(of_a_step(environ)))
    if by_task and shutil.which("scontrol"):
        with _asking:  # ask once for all nodes, because slurmctld serves the whole cluster
            found = _resources(environ.get("SLURM_JOB_ID") or environ["SLURM_JOBID"])
        line += [f"--gres={found[host]}"] if host in found else []
    return [*line, *program]


def of_a_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which srun would wrongly restrict the resources or output of a ``step``."""
    return {name: value for name, value in environ.items() if _OF_A_STEP.fullmatch(name)}


@cache
def _resources(job: str) -> dict[str, str]:
    """Return the generic resources allocated to a job on each of its nodes, such as ``gpu:2``."""
    asked = ["scontrol", "--details", "show", "job", job]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        print(f"ringdance: {shlex.join(asked)}: {why}. Ranks might not see all GPUs", file=sys.stderr)
    # For the first job of an array, the output contains the records of all its tasks.
    own = re.search(rf"^JobId={job}\b(?s:.*?)(?=^JobId=|\Z)", done.stdout, re.MULTILINE)
    records = re.findall(r"^\s+Nodes=(\S+) .*GRES=(\S+)$", own[0] if own else "", re.MULTILINE)
    return {name: re.sub(r"\([^)]*\)", "", gres) for nodes, gres in records for name in expand(nodes)}


def expand(text: str) -> list[str]:
    """Expand a Slurm node list: ``"a[01-03,7],b"`` gives a01, a02, a03, a7, b.

    Raises:
        LaunchError: The list cannot be parsed.
    """
    if text.count("[") != text.count("]"):
        raise LaunchError(f"SLURM_JOB_NODELIST={text}: a bracket is not closed")
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names += _expand_one(part.strip(), text)
    return names


def _expand_one(part: str, text: str) -> list[str]:
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, suffix = rest.partition("]")
    numbers: list[str] = []
    for item in inside.split(","):
        low, _, high = item.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            raise LaunchError(f"SLURM_JOB_NODELIST={text}: {item!r} is not a number or range")
        numbers += [f"{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    return [prefix + number + tail for number in numbers for tail in _expand_one(suffix, text)]


def counts(text: str) -> list[int]:
    """Expand a Slurm list of per-node counts: ``"2(x3),1"`` gives 2, 2, 2, 1.

    Raises:
        LaunchError: The list cannot be parsed.
    """
    one = r"(\d+)(?:\(x(\d+)\))?"
    if not re.fullmatch(rf"{one}(,{one})*", text):
        raise LaunchError(f"{text!r} is not a valid Slurm list of per-node counts such as 4(x2),3")
    return [int(number) for number, nodes in re.findall(one, text) for _ in range(int(nodes or 1))]
