"""Prepare a job: make a plan, and start an idle agent on every other host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ringdance.errors import LaunchError
from ringdance.host.directories import METRICS_DIR, OWN_DIRECTORY, TIMELINE
from ringdance.host.limits import usable_cores
from ringdance.host.schedulers.this_machine import local_names
from ringdance.host.system import machine
from ringdance.launch.hosts import assign_ranks, counted, facts_from
from ringdance.launch.mpi import find_mpi
from ringdance.launch.plan import Plan, build_plan
from ringdance.launch.remote.connect import PIPES, Remote, allow_open_files, close_all, connect
from ringdance.launch.spec import JobSpec, check_machine, script_of

_FOR_RANK = 4  # number of file descriptors that this host's agent needs per rank
_RECORDS = "RINGDANCE_FLIGHT_RECORDER_DIR"

Log = Callable[[str], None]
"""Shows one line to the user."""


@dataclass
class PreparedJob:
    """A job with its plan, and with idle agents on the other hosts.

    Attributes:
        plan: What will be started.
        remotes: The agents on the other hosts.
    """

    plan: Plan
    remotes: list[Remote]

    def close(self) -> None:
        """End the agents without starting the job."""
        close_all(self.remotes)

    @property
    def spec(self) -> JobSpec:
        """The job, with its hosts and ranks."""
        return self.plan.spec

    @property
    def needed(self) -> list[str]:
        """Files that must exist on every host."""
        program, *arguments = self.spec.command
        script = script_of(arguments) if os.path.basename(program).startswith("python") else None
        own = [] if self.spec.shell.python and program == sys.executable else [program]
        return [*own, *([script] if script else [])]


Check = Callable[[PreparedJob, Log], None]
"""Checks a prepared job. Raises LaunchError if the job must not start."""


def prepare(
    spec: JobSpec, log: Log = lambda text: None, connect: Callable[..., list[Remote]] = connect,
    local: Collection[str] | None = None,
) -> PreparedJob:
    """Plan the job and start an agent on every other host. The command must already be resolved.

    Args:
        spec: The job.
        log: Called with messages about what the launcher is waiting for.
        connect: Starts the agents. Has the parameters of ``remote.connect.connect()``.
        local: Host names that refer to this machine. Default: those whose addresses belong to it.

    Raises:
        LaunchError: The job cannot be prepared. Nothing is left running.
    """
    check_machine()
    spec = spec.resolved()
    assert spec.ranks is not None
    hosts = spec.hosts or [("localhost", spec.ranks)]
    local = local_names(name for name, _ in hosts) if local is None else local
    if spec.chdir and all(name in local for name, _ in hosts) and not os.path.isdir(spec.chdir):
        raise LaunchError(f"--chdir {spec.chdir}: the directory does not exist on this host")
    # Report local problems before connecting to other hosts.
    placed = assign_ranks(spec.ranks, hosts)
    mpi = find_mpi()
    others = list(dict.fromkeys(name for name, _ in hosts if name not in local))
    if spec.check:
        here = sum(len(host.ranks) for host in placed if host.name in local)
        files = PIPES * len(others) + _FOR_RANK * here + 2 * spec.ranks * bool(spec.output_directory)
        allow_open_files(files, f"{counted(spec.ranks, 'rank')} on {counted(len(placed), 'host')}")
    remotes = connect(others, spec.shell, spec.start_timeout, log) if others and spec.check else []
    facts = dict.fromkeys(local, facts_from(machine.facts()))
    facts |= {remote.host: remote.facts for remote in remotes}
    planned = replace(spec, exports=_exports(spec, rank_0_here=hosts[0][0] in local))
    try:
        plan = build_plan(
            planned, mpi=mpi, cores=usable_cores(), environ=os.environ, facts=facts, local=local,
            root=os.getuid() == 0,
        )  # fmt: skip
    except BaseException:
        close_all(remotes)
        raise
    used = {host.name for host in plan.hosts}  # may not be all hosts, as there may be more slots than ranks
    close_all(remote for remote in remotes if remote.host not in used)
    return PreparedJob(plan, [remote for remote in remotes if remote.host in used])


def _exports(spec: JobSpec, rank_0_here: bool) -> dict[str, str]:
    """Return the variables for all ranks: the user's, and the paths of further output files."""
    exports = dict(spec.exports)
    if spec.output_directory:  # also the default directory for the flight recorder and metrics
        for name in (_RECORDS, METRICS_DIR):
            if name not in os.environ:
                exports.setdefault(name, os.path.abspath(spec.output_directory))
    if spec.timeline:  # rank 0 writes it; if rank 0 runs on another host, the agent there sends it
        ending = os.path.splitext(spec.timeline)[1].lstrip(".") or "json"
        there = f"{OWN_DIRECTORY}/{TIMELINE}{ending}"
        exports["RINGDANCE_TIMELINE"] = os.path.abspath(spec.timeline) if rank_0_here else there
    return exports
