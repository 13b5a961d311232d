"""Conversation with many agents at once."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ringdance.launch.remote.connect import Remote

Event = tuple[str, dict[str, Any] | None, bytes]
"""A host, what its agent has sent (None: it is lost), and the bytes that came with it."""


class Talk:
    """Sends without waiting, and hears from whoever has something to say.

    Args:
        remotes: the agents, by host; they stay the caller's.
    """

    def __init__(self, remotes: Mapping[str, Remote]) -> None:
        self._remotes = dict(remotes)
        self._selector = selectors.DefaultSelector()
        self.lost: dict[str, str] = {}
        for host, remote in self._remotes.items():
            self._selector.register(remote.frames.read_fd, selectors.EVENT_READ, host)

    @property
    def there(self) -> list[str]:
        """Hosts that are not lost."""
        return [host for host in self._remotes if host not in self.lost]

    def send(self, host: str, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send to one of them; that it is lost will be heard."""
        if host not in self.lost:
            self._remotes[host].frames.send(dict(message), payload)

    def unsent(self, host: str) -> int:
        """Bytes that wait for a host, 0 if it is lost."""
        return 0 if host in self.lost else self._remotes[host].frames.unsent

    def step(self, timeout: float | None) -> list[Event]:
        """What comes within that many seconds (None: wait for something), as soon as there is something."""
        for host in self.there:
            self._watch_writing(host)
        found: list[Event] = []
        for key, _ in self._selector.select(timeout):
            host = key.data
            if host in self.lost:
                continue
            remote = self._remotes[host]
            if key.fd != remote.frames.read_fd:
                remote.frames.flush()
                continue
            found += self._read(host, remote)
        return found

    def _watch_writing(self, host: str) -> None:
        frames = self._remotes[host].frames
        watched = self._selector.get_map().get(frames.write_fd) is not None
        wanted = bool(frames.unsent) and frames.open
        if wanted and not watched:
            self._selector.register(frames.write_fd, selectors.EVENT_WRITE, host)
        elif watched and not wanted:
            self._selector.unregister(frames.write_fd)

    def _read(self, host: str, remote: Remote) -> list[Event]:
        why = "its connection was closed"
        try:
            messages, alive = remote.frames.receive()
        except ValueError as error:
            messages, alive, why = [], False, f"it sent what is no message: {error}"
        found: list[Event] = [(host, message, payload) for message, payload in messages]
        if not alive:
            said = remote.last_words()
            self.lost[host] = f"it is gone: {why}" + (f" ({said})" if said else "")
            for descriptor in (remote.frames.read_fd, remote.frames.write_fd):
                if self._selector.get_map().get(descriptor) is not None:
                    self._selector.unregister(descriptor)
            found.append((host, None, b""))
        return found

    def ask(
        self,
        message: Mapping[str, Any],
        payload: bytes = b"",
        hosts: Iterable[str] | None = None,
        seconds: float = 60.0,
    ) -> dict[str, dict[str, Any]]:
        """Send a chore to all (or some) and wait for the answer of each.

        Returns:
            By host; its "problem" is "" if there is none.
        """
        asked = self.there if hosts is None else hosts
        return self.ask_each({host: message for host in asked}, payload, seconds)

    def ask_each(
        self, messages: Mapping[str, Mapping[str, Any]], payload: bytes = b"", seconds: float = 60.0
    ) -> dict[str, dict[str, Any]]:
        """The same with a message of its own for each host, all of the same chore."""
        found = {host: {"problem": self.lost[host]} for host in messages if host in self.lost}
        for host, message in messages.items():
            self.send(host, message, payload)
        about = {(message["chore"], message.get("do")) for message in messages.values()}
        until = time.monotonic() + seconds
        while len(found) < len(messages):
            left = until - time.monotonic()
            for host, said, _ in self.step(max(0.0, left)):
                if host not in messages:
                    continue
                if said is None:
                    found[host] = {"problem": self.lost[host]}
                elif (said.get("did"), said.get("what")) in about:
                    found[host] = said
            if left <= 0:
                found |= {
                    h: {"problem": f"no answer within {seconds:g} s"} for h in messages if h not in found
                }
        return {host: found[host] for host in messages}

    def close(self) -> None:
        """Stop listening."""
        self._selector.close()
