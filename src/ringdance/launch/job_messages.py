"""Build the "job" message to agent/main.py, which contains everything an agent needs to prepare a job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.host.agent import paths
from ringdance.host.directories import METRICS_DIR, OUTPUT, OWN_DIRECTORY, SHARED, host_shared
from ringdance.host.system import linux, machine
from ringdance.launch.mpi.options import session_environment
from ringdance.launch.plan import Plan


@dataclass(frozen=True)
class Place:
    """A job's ID and directory.

    Attributes:
        id: Job ID.
        bases: Candidates for the parent of the job's directory, in order of preference.
        directory: The job's directory on this host.
    """

    id: str
    bases: Sequence[str]
    directory: str


def local_environment(plan: Plan, place: Place) -> dict[str, str]:
    """Return the environment of mpiexec and the ranks on this host."""
    own = plan.environ(os.environ)
    session = session_environment(plan.mpi.family, place.directory, SHARED if host_shared(place.id) else "")
    here = plan.spec.chdir if os.path.isdir(plan.spec.chdir) else os.getcwd()
    wrapper = paths.variables(os.path.abspath(here)) if plan.paths_differ else {}
    # Open MPI does not start without HOME.
    return {"HOME": machine.in_home("~"), **own, **session, **wrapper, linux.MARKER: place.id}


def job_messages(
    plan: Plan, place: Place, needed: Sequence[str], output_directory: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the "job" message for this host, and the one for all other hosts.

    Only the latter contains the ranks' environment, because the agent on this host already has it.

    Args:
        plan: The job's plan.
        place: The job's ID and directory.
        needed: Files that must exist on the other hosts.
        output_directory: Directory for files that other hosts send at the end of the job, if any.
    """
    common: dict[str, Any] = {"job": place.id, "bases": place.bases, "environ": {}, "needed": []}
    # Hydra's daemons change to mpiexec's working directory, which might not exist on other hosts. The ranks
    # then change to their own working directory.
    local = {**common, "launcher": None, "cwd": "/" if plan.paths_differ else os.getcwd()}
    session = session_environment(plan.mpi.family, OWN_DIRECTORY, SHARED)
    forwarded = plan.forwarded(os.environ)
    if output_directory and forwarded.get(METRICS_DIR) == os.path.abspath(output_directory):
        session[METRICS_DIR] = f"{OWN_DIRECTORY}/{OUTPUT}"
    remote = {
        **common,
        "cwd": plan.spec.chdir or os.getcwd(),
        "launcher": paths.launcher_paths() if plan.paths_differ else None,
        "needed": needed,
        "environ": {**forwarded, **session},
    }
    return local, remote


def rsh_script(directory: str) -> str:
    """Return a script that runs agent/rsh.py for the job's ``directory``. mpiexec runs it in place of ssh."""
    command = paths.bare_command("agent.rsh", os.path.join(directory, "s"))
    return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
