"""mpiexec of a running job, and its daemons on other hosts."""

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
"""The file in the job's directory that mpiexec runs as ssh. ``session_environment`` uses the same name."""


class Mpiexec:
    """Starts mpiexec, and for it its daemons, through the agents of their hosts.

    Args:
        plan: The job's plan.
        place: Its ID and directory.
        agents: The agents on all hosts.
        err: Receives mpiexec's own messages.
        on_exit: Called when mpiexec has exited, with its pid and exit code.
        on_daemon_exit: Called when a daemon has exited, with its host, exit code and exit time.

    Attributes:
        output: Filters the output of mpiexec and its daemons.
        code: mpiexec's exit code once it has exited.
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
        """Start mpiexec again. Returns False if that is pointless: it did not start daemons, or not again."""
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
        """Start a command on another host for mpiexec. Returns False if the host is not in the job.

        Args:
            link: Receives the exit code.
            name: The host, as mpiexec calls it.
            command: The command, for a shell.
        """
        self._wanted_daemons = True
        host = self._plan.host_of(name)
        # mpiexec passes its own settings to its daemons, and they name this host's directory. Daemons that
        # shared one directory would sometimes have the same process ID and so the same files. Each therefore
        # uses its own host's directory.
        command = command.replace(self._place.directory, OWN_DIRECTORY)

        def on_exit(_: int, code: int, when: float) -> None:
            link.send({"code": code})
            if host:
                self._on_daemon_exit(host, code, when)

        if host is None or not self._agents.spawn(host.name, on_exit, command=command):
            link.send({"code": 255})
            return False
        return True
