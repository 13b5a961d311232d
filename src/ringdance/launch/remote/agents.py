"""The agents of a running job, seen from the launcher: what they report, and whether they are still there."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringdance.launch.cause import signal_name
from ringdance.launch.messages import Frames
from ringdance.launch.remote.connect import Remote

_PING_S = 0.5
_LATE_S = 1.5  # a host that has not answered for so long may be gone: worth waiting to know


class RankChannel:
    """To the supervisor of a rank on another host; as :class:`ringdance.launch.messages.Channel`."""

    def __init__(self, remote: Remote, number: int) -> None:
        self.remote, self.number = remote, number

    def send(self, message: dict[str, Any]) -> bool:
        """False if the host is gone."""
        return self.remote.frames.send({"to": self.number, "message": message})


class Events(Protocol):
    """What a job wants to hear."""

    def agents_ready(self) -> None:
        """All agents have prepared themselves, or have told what is in their way."""

    def agents_clean(self) -> None:
        """All agents that there still are have cleaned up and ended."""

    def rank_said(self, channel: RankChannel, message: dict[str, Any]) -> None:
        """A supervisor has reported."""

    def rank_wrote(self, channel: RankChannel, which: int, data: bytes) -> None:
        """A rank has written to stdout (0) or stderr (1); no data: it has closed it."""

    def rank_gone(self, channel: RankChannel) -> None:
        """A supervisor's connection has ended."""

    def mpiexec_said(self, data: bytes) -> None:
        """A daemon of mpiexec's has written something."""

    def host_failed(self, host: str, message: str, lost: bool) -> None:
        """A host is lost, or a program of the job's that is no rank was killed there."""

    def daemon_ended(self, host: str, code: int, when: float) -> None:
        """What mpiexec has started there has ended; seconds since the epoch."""

    def file_came(self, name: str, data: bytes, last: bool) -> None:
        """A part of a file that a rank has left in the job's folder on its host, or its end."""


@dataclass
class _Agent:
    remote: Remote
    ready: bool = False
    clean: bool = False
    lost: bool = False
    problem: str = ""

    @property
    def there(self) -> bool:
        return not (self.lost or self.clean)


class Agents:
    """All agents of a job.

    Args:
        remotes: the hosts; owned from now on.
        selector: the job's loop.
        events: the job.
        silence: seconds after which a host that says nothing is lost.
    """

    def __init__(
        self, remotes: Sequence[Remote], selector: selectors.BaseSelector, events: Events, silence: float
    ) -> None:
        self._agents = {remote.host: _Agent(remote) for remote in remotes}
        self._selector, self._events, self._silence = selector, events, silence
        self._channels: dict[tuple[str, int], RankChannel] = {}
        self._doors: dict[int, Callable[[int], None]] = {}
        self._input: tuple[RankChannel, int] | None = None
        self._paused = False
        for agent in self._agents.values():
            fd = agent.remote.frames.read_fd
            selector.register(fd, selectors.EVENT_READ, lambda agent=agent: self._read(agent))

    def begin(self, order: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Tell all what the job is: fields of the message "job" but its silence."""
        for agent in self._agents.values():
            agent.remote.heard = time.monotonic()
            agent.remote.frames.send({**order, "silence": self._silence})
            for name, data in files.items():
                agent.remote.frames.send({"put": name}, data)

    @property
    def frames(self) -> list[Frames]:
        """The connections, for pings."""
        return [agent.remote.frames for agent in self._agents.values()]

    @property
    def ready(self) -> bool:
        """Whether all have prepared themselves."""
        return all(agent.ready for agent in self._agents.values())

    @property
    def problems(self) -> list[str]:
        """What is in the way, a line for each host concerned."""
        return [f"host {host}: {agent.problem}" for host, agent in self._agents.items() if agent.problem]

    @property
    def gone(self) -> bool:
        """Whether none is left to wait for."""
        return not any(agent.there for agent in self._agents.values())

    @property
    def pending(self) -> bool:
        """Whether any host has not answered for a while, but not for so long that it counts as lost."""
        now = time.monotonic()
        return any(agent.there and now - agent.remote.heard > _LATE_S for agent in self._agents.values())

    def host_of(self, channel: RankChannel) -> str:
        """The name of its host, as given."""
        return channel.remote.host

    def spawn(self, host: str, command: str, done: Callable[[int], None]) -> bool:
        """Start a command on a host; `done` is told its exit code. False if no agent is on that host."""
        agent = self._agents.get(host)
        if agent is None or not agent.there:
            return False
        number = len(self._doors)
        self._doors[number] = done
        return agent.remote.frames.send({"spawn": number, "command": command})

    def pause(self, paused: bool) -> None:
        """Whether the launcher stands still, as it does while it is stopped by the terminal."""
        self._paused = paused
        for agent in self._agents.values():
            agent.remote.heard = time.monotonic()
            agent.remote.frames.send({"pause": paused})

    def clean(self, failed: bool) -> None:
        """Tell all to end; `agents_clean` follows."""
        for agent in self._agents.values():
            if agent.there and not agent.remote.frames.send({"clean": True, "failed": failed}):
                agent.lost = True
        if self.gone:
            self._events.agents_clean()

    def give_up(self) -> None:
        """Count all that still do not answer as lost."""
        for agent in self._agents.values():
            agent.lost = agent.lost or not agent.clean

    def look(self) -> float:
        """Find silent hosts; seconds until the next look is due."""
        now = time.monotonic()
        for agent in self._agents.values():
            late = agent.there and agent.ready and now - agent.remote.heard > self._silence
            if late and not self._paused and self._silent(agent):
                self._lose(
                    agent, f"it has not answered for {self._silence:g} s: it is down, or its network is"
                )
        for agent in self._agents.values():
            agent.remote.frames.flush()
            self._watch_room(agent, agent.there)
        return _PING_S

    def _watch_room(self, agent: _Agent, there: bool) -> None:
        """Have the loop send on what waits for this host as soon as there is room."""
        frames = agent.remote.frames
        waits = there and frames.open and bool(frames.unsent)
        known = self._selector.get_map().get(frames.write_fd) is not None
        if waits and not known:
            self._selector.register(frames.write_fd, selectors.EVENT_WRITE, lambda: self._send_on(agent))
        elif known and not waits:
            self._selector.unregister(frames.write_fd)

    def _send_on(self, agent: _Agent) -> None:
        agent.remote.frames.flush()
        self._watch_room(agent, agent.there)

    def _silent(self, agent: _Agent) -> bool:
        """Whether nothing lies in its connection either: this process may have been the one to sleep."""
        with selectors.DefaultSelector() as selector:
            selector.register(agent.remote.frames.read_fd, selectors.EVENT_READ)
            return not selector.select(0)

    def _lose(self, agent: _Agent, why: str) -> None:
        agent.lost = True
        self._selector.unregister(agent.remote.frames.read_fd)
        self._watch_room(agent, False)
        agent.remote.process.kill()
        self._events.host_failed(agent.remote.host, why, lost=True)
        for (host, _), channel in list(self._channels.items()):
            if host == agent.remote.host:
                self._events.rank_gone(channel)

    # --- reports -------------------------------------------------------------------------------

    def _read(self, agent: _Agent) -> None:
        try:
            messages, alive = agent.remote.frames.receive()
        except ValueError as error:
            self._lose(agent, f"it sent what is no message: {error}")
            return
        agent.remote.heard = time.monotonic()
        for message, payload in messages:
            self._take(agent, message, payload)
        if not alive and agent.there:
            said = agent.remote.last_words()
            self._lose(agent, "it is gone: its connection was closed" + (f" ({said})" if said else ""))
        elif not alive:
            self._selector.unregister(agent.remote.frames.read_fd)

    def _take(self, agent: _Agent, message: dict[str, Any], payload: bytes) -> None:
        events, host = self._events, agent.remote.host
        if "from" in message:
            number = message["from"]
            channel = self._channels.setdefault((host, number), RankChannel(agent.remote, number))
            if "message" in message:
                events.rank_said(channel, message["message"])
            elif "stream" in message:
                events.rank_wrote(channel, message["stream"], payload)
            else:
                del self._channels[host, number]
                events.rank_gone(channel)
        elif "ready" in message:
            agent.ready, agent.problem = True, message["problem"]
            if self.ready:
                events.agents_ready()
        elif "said" in message:
            events.mpiexec_said(payload)
        elif "spawned" in message:
            self._doors[message["spawned"]](message["code"])
            events.daemon_ended(host, message["code"], message["time"])
        elif "died" in message:
            name = signal_name(message["signal"])
            why = f"{message['name']} (pid {message['died']}), which is no rank, was killed by {name}"
            events.host_failed(host, why, lost=False)
        elif "took" in message:
            self._await_input()
        elif "file" in message:
            events.file_came(message["file"], payload, message["last"])
        elif "cleaned" in message:
            agent.clean = True
            if self.gone:
                events.agents_clean()

    # --- what rank 0 reads ---------------------------------------------------------------------

    def feed(self, channel: RankChannel, descriptor: int) -> None:
        """Pass what can be read from `descriptor` on to a rank, piece by piece as it takes it."""
        self._input = channel, descriptor
        self._await_input()

    def _await_input(self) -> None:
        assert self._input
        try:
            self._selector.register(self._input[1], selectors.EVENT_READ, self._pass_input_once)
        except PermissionError:  # a file, or /dev/null: cannot be waited for, and need not
            self._pass_input()

    def _pass_input_once(self) -> None:
        assert self._input
        self._selector.unregister(self._input[1])
        self._pass_input()

    def _pass_input(self) -> None:
        assert self._input
        channel, descriptor = self._input
        try:
            data = os.read(descriptor, 32768)
        except OSError:
            data = b""
        channel.remote.frames.send({"stdin": channel.number}, data)

    def close(self) -> None:
        """End all connections, and so all agents."""
        for agent in self._agents.values():
            self._watch_room(agent, False)
            if self._selector.get_map().get(agent.remote.frames.read_fd) is not None:
                self._selector.unregister(agent.remote.frames.read_fd)
            if agent.lost:
                agent.remote.process.kill()
            agent.remote.close()
