"""The launcher's view of a running job's agents: one on each host, including the launcher's host."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.host.messages import watch
from ringdance.launch.cause import signal_name
from ringdance.launch.hosts import counted
from ringdance.launch.remote.connect import Remote, close_all

_PING_S = 0.5
# Hosts are normally checked every _PING_S. A gap this long means that this process was suspended.
_SLEPT_S = 2.0
_LATE_S = 1.5  # silence after which a host may be lost; the job then waits until it is certain
# Silence after which a host is reported to the user or, if the job has failed, considered lost.
_SHOWN_S = 6.0
_CHECK_S = 0.02  # minimum interval between checks of the hosts
_CLOSE_S = 6.0  # how long to wait for the local agent to clean up

OnExit = Callable[[int, int, float], None]
"""Called with a program's pid, exit code (or -signal), and exit time (seconds since the epoch)."""


class RankLink:
    """The connection to a rank's wrapper, through the agent on the rank's host.

    Args:
        remote: The agent on the rank's host.
        number: Number by which the agent identifies its connection to the wrapper.
    """

    def __init__(self, remote: Remote, number: int) -> None:
        self.remote, self.number = remote, number

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the wrapper. Returns False if the host is lost."""
        return self.remote.frames.send({"to": self.number, "message": message})


@dataclass(frozen=True)
class Handlers:
    """Callbacks for the agents' reports to a job. All are called from the job's event loop.

    Attributes:
        on_ready: Called when every agent is ready or has reported a problem.
        on_note: Called with a detail to show if --verbose is set.
        on_output: Called with output from mpiexec or one of its daemons.
        on_file: Called with part of a file that a rank wrote to the job's directory on another host: the
            file's name, the data, and True if this is the last part.
        on_rank_message: Called with a message from a wrapper.
        on_rank_output: Called with a rank's output on stdout (0) or stderr (1). Empty data means that the
            rank has closed the stream.
        on_rank_closed: Called when the connection to a wrapper has closed.
        on_host_failed: Called with a host, a message and a flag. The flag is True if the host is lost, and
            False if one of the job's processes there, other than a rank, was killed.
        on_silence: Called with a host and a message when the host falls silent or answers again.
        on_clean: Called when the agent on this host (True) or all agents on other hosts (False) have cleaned
            up or are lost.
        on_local_lost: Called with the reason when the agent on this host has exited.
    """

    on_ready: Callable[[], None]
    on_note: Callable[[str], None]
    on_output: Callable[[bytes], None]
    on_file: Callable[[str, bytes, bool], None]
    on_rank_message: Callable[[RankLink, dict[str, Any]], None]
    on_rank_output: Callable[[RankLink, int, bytes], None]
    on_rank_closed: Callable[[RankLink], None]
    on_host_failed: Callable[[str, str, bool], None]
    on_silence: Callable[[str, str], None]
    on_clean: Callable[[bool], None]
    on_local_lost: Callable[[str], None]


class Agents:
    """All agents that serve a job.

    Args:
        local: The agent on this host. Ownership passes to this object.
        remotes: The agents on other hosts. Ownership passes to this object.
        selector: The job's event loop.
        handlers: Callbacks for the agents' reports.
        heartbeat_timeout: Seconds without a message after which another host is considered lost.

    Attributes:
        heard: Time (``time.monotonic()``) of the last message from any agent.
    """

    def __init__(
        self, local: Remote, remotes: Sequence[Remote], selector: selectors.BaseSelector, handlers: Handlers,
        heartbeat_timeout: float,
    ) -> None:  # fmt: skip
        self._local = local
        self._remotes = list(remotes)
        self._all = {agent.host: agent for agent in (*self._remotes, self._local)}
        self._selector, self._handlers, self._heartbeat_timeout = selector, handlers, heartbeat_timeout
        self._links: dict[tuple[str, int], RankLink] = {}
        self._programs: list[OnExit] = []
        self._checked, self._check_at, self.heard = time.monotonic(), 0.0, 0.0
        for agent in self._all.values():
            fd = agent.frames.read_fd
            selector.register(fd, selectors.EVENT_READ, lambda agent=agent: self._read(agent))

    def begin(self, local: Mapping[str, Any], remote: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Send all agents the job's description, and files to store in the job's directory on each host.

        Args:
            local: The "job" message for this host, without the timeout.
            remote: The "job" message for the other hosts, without the timeout.
            files: Contents of the files by name.
        """
        for agent in self._all.values():
            agent.heard = time.monotonic()
            timeout = None if agent.local else self._heartbeat_timeout
            agent.frames.send({**(local if agent.local else remote), "heartbeat_timeout": timeout})
            for name, data in files.items():
                agent.frames.send({"put": name}, data)

    @property
    def problems(self) -> dict[str, str]:
        """Problems reported by agents during preparation, by host."""
        return {host: agent.problem for host, agent in self._all.items() if agent.problem}

    def doing(self, host: str, connected: int) -> str:
        """Describe a host's startup progress. ``connected`` is how many of the host's ranks are connected."""
        agent = self._all[host]
        silent = not agent.local and time.monotonic() - agent.heard > _LATE_S
        state = "nothing has been started there" if agent.ready else "it has not created the job's directory"
        if agent.started:
            program = "mpiexec" if agent.local else "mpiexec's daemon"
            ranks = f"only {counted(connected, 'rank')}" if connected else "no rank"
            state = f"{program} was started, but {ranks} connected"
        return f"the agent {'does not respond' if silent else 'responds'}; {state}"

    @property
    def remotes_gone(self) -> bool:
        """True if no other host is left to wait for."""
        return not any(agent.there for agent in self._remotes)

    @property
    def pending(self) -> bool:
        """True if any host has been silent for a while, but not long enough to be considered lost."""
        now = time.monotonic()
        return any(agent.there and now - agent.heard > _LATE_S for agent in self._remotes)

    def port(self, host: str) -> int:
        """Return the port that a host's agent has reserved."""
        return self._all[host].port

    def put(self, name: str, text: str, mode: int = 0o600) -> None:
        """Write a file to the job's directory on this host."""
        self._local.frames.send({"put": name, "mode": mode}, text.encode())

    def spawn(self, host: str | None, on_exit: OnExit, **program: Any) -> bool:
        """Start a program through an agent. Returns False if the host has no agent.

        Args:
            host: Host on which to start the program, None for this host.
            on_exit: Called when the program has exited.
            program: Keyword arguments for ``Programs.spawn()``.
        """
        agent = self._all.get(host) if host else self._local
        if agent is None or not agent.there:
            return False
        agent.started = True
        self._programs.append(on_exit)
        return agent.frames.send({"spawn": len(self._programs) - 1, **program})

    # --- ending the job ------------------------------------------------------------------------

    def clean_remotes(self, failed: bool) -> None:
        """End the job on the other hosts. The handler ``on_clean`` is called afterwards."""
        for agent in self._remotes:
            if agent.there and not agent.frames.send({"clean": True, "failed": failed}):
                agent.lost = True
        if self.remotes_gone:
            self._handlers.on_clean(False)

    def clean_local(self, failed: bool) -> None:
        """End the job on this host. The handler ``on_clean`` or ``on_local_lost`` is called afterwards."""
        self._local.frames.send({"clean": True, "failed": failed, "results": False})

    def give_up_remotes(self) -> None:
        """Mark all other hosts that have not cleaned up yet as lost."""
        for agent in self._remotes:
            agent.lost = agent.lost or not agent.clean

    def kill_local(self) -> None:
        """Kill the agent on this host. The handler ``on_local_lost`` is called afterwards."""
        self._local.kill()

    def close(self) -> None:
        """Close all connections. Any agents that are still running then exit."""
        for agent in self._all.values():
            for descriptor in (agent.frames.read_fd, agent.frames.write_fd):
                watch(self._selector, descriptor, 0, None)
            if agent.lost and not agent.local:
                agent.kill()
        self._local.close(_CLOSE_S)  # close this first, as the local agent has inherited the others
        close_all(self._remotes)
        for lock in {agent.frames.shared[0] for agent in self._remotes if agent.frames.shared}:
            os.close(lock)

    # --- heartbeats ----------------------------------------------------------------------------

    def check(self, failed: bool) -> float | None:
        """Detect lost hosts and send pending data.

        Args:
            failed: True if the job has failed. A shorter timeout then applies, because a silent host may be
                the cause.

        Returns:
            Seconds until the next check is due, or None if no further check is needed.
        """
        now, timeout = time.monotonic(), self._heartbeat_timeout
        if self._remotes and now < self._check_at:
            return self._check_at - now
        self._check_at = now + _CHECK_S
        if now - self._checked > _SLEPT_S:  # this process was suspended, so it has not read any messages
            for agent in self._remotes:
                agent.heard = now
        self._checked = now
        shown = min(timeout, _SHOWN_S)
        limit = shown if failed else timeout
        there = [agent for agent in self._remotes if agent.there and agent.ready]
        silent = [agent for agent in there if now - agent.heard > shown and self._silent(agent)]
        late = [agent for agent in silent if now - agent.heard > limit]
        if late and len(there) > 1 and all(now - agent.heard > limit - 2 * _PING_S for agent in there):
            why = f"no heartbeat from any other host for {limit:g} s: this host's own network may be down"
            self._handlers.on_host_failed(self._local.host, why, False)
            late = there
        for agent in late:
            self._lose(agent, f"no heartbeat for {limit:g} s (host or network down)")
        for agent in silent:
            if agent.there and not agent.silent:
                agent.silent = True
                text = f"no heartbeat for {shown:g} s. After {timeout:g} s (--host-timeout), "
                self._handlers.on_silence(agent.host, text + "the host is considered lost")
        for agent in self._all.values():
            if agent.frames.unsent:
                self._send_on(agent)
        return _PING_S if self._remotes else None

    def _send_on(self, agent: Remote) -> None:
        """Send an agent's pending data. The event loop sends the rest when the connection is writable."""
        frames = agent.frames
        waits = agent.there and frames.unsent and frames.flush() and frames.unsent
        action = (lambda: self._send_on(agent)) if waits else None
        watch(self._selector, frames.write_fd, selectors.EVENT_WRITE, action)

    def _silent(self, agent: Remote) -> bool:
        """Return True if the connection has no unread data. Otherwise, this process is slow, not the host."""
        with selectors.DefaultSelector() as selector:
            selector.register(agent.frames.read_fd, selectors.EVENT_READ)
            return not selector.select(0)

    def _lose(self, agent: Remote, why: str) -> None:
        agent.lost = True
        watch(self._selector, agent.frames.read_fd, 0, None)
        self._send_on(agent)
        code = agent.kill()
        if agent.local:
            self._handlers.on_local_lost(f"exit code {code}: {why}")
            return
        self._handlers.on_host_failed(agent.host, why, True)
        for link in [link for link in self._links.values() if link.remote is agent]:
            self._handlers.on_rank_closed(link)

    # --- reports -------------------------------------------------------------------------------

    def _read(self, agent: Remote) -> None:
        try:
            messages, alive = agent.frames.receive()
        except ValueError as error:
            self._lose(agent, f"protocol error: {error}")
            return
        now = time.monotonic()
        if agent.silent:
            agent.silent = False
            self._handlers.on_silence(agent.host, f"heartbeats have resumed after {now - agent.heard:.0f} s")
        self.heard = agent.heard = now
        for message, payload in messages:
            self._take(agent, message, payload)
        if not alive and agent.there:
            last = agent.last_words()
            self._lose(agent, "connection closed" + (f" ({last})" if last else ""))
        elif not alive:
            watch(self._selector, agent.frames.read_fd, 0, None)

    def _take(self, agent: Remote, message: dict[str, Any], payload: bytes) -> None:
        handlers, host = self._handlers, agent.host
        if "from" in message:
            self._from_rank(agent, message, payload)
        elif "ready" in message:
            agent.ready, agent.problem, agent.port = True, message["problem"], message["port"]
            if all(each.ready for each in self._all.values()):
                handlers.on_ready()
        elif "output" in message:
            handlers.on_output(payload)
        elif "note" in message:
            handlers.on_note(message["note"])
        elif "exited" in message:
            when = agent.time_here(message["time"])
            self._programs[message["exited"]](message["pid"], message["code"], when)
        elif "died" in message:
            name = signal_name(message["signal"])
            why = f"{message['name']} (pid {message['died']}), which is not a rank, was killed by {name}"
            handlers.on_host_failed(host, why, False)
        elif "file" in message:
            handlers.on_file(message["file"], payload, message["last"])
        elif "cleaned" in message:
            agent.clean = True
            if agent.local or self.remotes_gone:
                handlers.on_clean(agent.local)

    def _from_rank(self, remote: Remote, message: dict[str, Any], payload: bytes) -> None:
        number = message["from"]
        link = self._links.setdefault((remote.host, number), RankLink(remote, number))
        if "message" in message:
            self._handlers.on_rank_message(link, message["message"])
        elif "stream" in message:
            self._handlers.on_rank_output(link, message["stream"], payload)
        else:
            del self._links[remote.host, number]
            self._handlers.on_rank_closed(link)
