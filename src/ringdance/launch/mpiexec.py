"""The mpiexec process of a running job, and mpiexec's daemons on other hosts."""

from __future__ import annotations

import os
from collections.abc import Callable

from ringdance.host.directories import OWN_DIRECTORY
from ringdance.launch.agents import Agents, RankLink
from ringdance.launch.hosts import Host
from ringdance.launch.job_messages import Place, rsh_script
from ringdance.launch.mpi.options import MACHINE_FILE, RSH_SHIM, machine_file
from ringdance.launch.output.stream import MpiexecOutput, Sink
from ringdance.launch.plan import Plan

_SHIM = "ssh"
"""Name of the file in the job's directory that mpiexec runs as ssh. ``session_environment()`` uses it too."""


class Mpiexec:
    """Starts mpiexec, and starts its daemons on other hosts when mpiexec requests them.

    Args:
        plan: The job's plan.
        place: The job's ID and directory.
        agents: The agents on all hosts.
        err: Receives mpiexec's own messages.
        on_exit: Called with mpiexec's process ID and exit code when it has exited.
        on_daemon_exit: Called with a daemon's host, exit code and exit time when it has exited.

    Attributes:
        output: Filters the output of mpiexec and its daemons.
        code: Exit code of mpiexec, None until it has exited.
    """

    def __init__(
        self, plan: Plan, place: Place, agents: Agents, err: Sink,
        on_exit: Callable[[int, int], None], on_daemon_exit: Callable[[Host, int, float], None],
    ) -> None:  # fmt: skip
        self._plan, self._place, self._agents = plan, place, agents
        self._on_exit, self._on_daemon_exit = on_exit, on_daemon_exit
        self.output = MpiexecOutput(err)
        self.code: int | None = None
        self._wanted_daemons = self._retried = False

    def start(self) -> None:
        """Start mpiexec."""
        if self._plan.multi_host:
            hosts = machine_file(self._plan.hosts, self._plan.mpi.family)
            self._agents.put(_SHIM, rsh_script(self._place.directory), 0o700)
            self._agents.put(MACHINE_FILE.replace(RSH_SHIM, _SHIM), hosts)
        self._spawn()

    def retry(self) -> bool:
        """Restart mpiexec, at most once and only if it has requested daemons. Returns True if restarted."""
        if not self._wanted_daemons or self._retried:
            return False
        self._retried = True
        self._spawn()
        return True

    def _spawn(self) -> None:
        place = self._place
        argv = self._plan.argv(place.bases, place.id, os.path.join(place.directory, _SHIM))

        def on_exit(pid: int, code: int, when: float) -> None:
            self.code = code
            self._on_exit(pid, code)

        self._agents.spawn(None, on_exit, argv=argv, loopback=not self._plan.multi_host)

    def start_daemon(self, link: RankLink, name: str, command: str) -> bool:
        """Start a daemon on another host for mpiexec. Returns False if the host is not part of the job.

        Args:
            link: Connection that receives the exit code.
            name: Name by which mpiexec refers to the host.
            command: Shell command that starts the daemon.
        """
        self._wanted_daemons = True
        host = self._plan.host_of(name)
        # mpiexec passes its own settings to the daemons, including the job's directory on this host. If the
        # daemons shared that directory, two of them with the same process ID would use the same files.
        # Replace that directory, so that each daemon uses the one on its own host.
        command = command.replace(self._place.directory, OWN_DIRECTORY)

        def on_exit(_: int, code: int, when: float) -> None:
            link.send({"code": code})
            if host:
                self._on_daemon_exit(host, code, when)

        if host is None or not self._agents.spawn(host.name, on_exit, command=command):
            link.send({"code": 255})
            return False
        return True
