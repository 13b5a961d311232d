"""Links between the monitors of several hosts: records go to the one that writes the file.

The monitor on rank 0's host listens; those of the other hosts connect with a token that came through MPI.
Clocks are compared by round trips: of several the shortest one tells best how far they are apart.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from ringdance.core.ring import Label, RingReader, Who
from ringdance.launch.messages import Frames
from ringdance.launch.remote import tcp

__all__ = ["Clock", "Follower", "RemoteRing", "Sender"]

_FIRST_ROUNDS = 8
_REPEAT_S = 1.0


class Clock:
    """How far another host's monotonic clock is ahead of this one's, by round trips.

    Attributes:
        ahead: in nanoseconds.
        known: whether there have been enough round trips.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.known = False
        self._best = 1 << 62
        self._rounds = 0
        self._next = 0.0

    def due(self) -> bool:
        """Return whether it is time for a round trip."""
        return time.monotonic() >= self._next

    def ask(self) -> dict[str, Any]:
        """Return the question to send now."""
        self._rounds += 1
        self._next = time.monotonic() + (0.0 if self._rounds < _FIRST_ROUNDS else _REPEAT_S)
        return {"do": "clock", "sent": time.monotonic_ns()}

    def answer(self, sent: int, theirs: int) -> None:
        """Take an answer in."""
        now = time.monotonic_ns()
        self._best += self._best >> 6  # clocks drift: a short round trip counts for some minutes
        if now - sent <= self._best:
            self._best = now - sent
            self.ahead = theirs - (sent + now) // 2
        self.known = self._rounds >= _FIRST_ROUNDS


class RemoteRing:
    """What has come of another host's ring.

    Attributes:
        taken: what ``RingReader.take`` returned there, and how far that clock is ahead.
    """

    def __init__(self, who: Who) -> None:
        self.who = who
        self.labels: list[Label] = []
        self.taken: list[tuple[int, bytes, int]] = []

    def name(self, number: int) -> Label:
        """Return a label."""
        return self.labels[number] if number < len(self.labels) else ""


class Follower:
    """The link to another host's monitor, at the one that writes the file.

    Args:
        sock: an authenticated connection.

    Attributes:
        stopped: no more records will come, for now or, with the link, for ever.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = Frames(sock.fileno(), sock.fileno())
        self.clock = Clock()
        self.rings: dict[int, RemoteRing] = {}
        self.stopped = self._ended = False

    def receive(self) -> bool:
        """Take in what has come; close the link at the end, and return False."""
        messages, alive = self.frames.receive()
        for message, data in messages:
            if "sent" in message:
                self.clock.answer(message["sent"], message["theirs"])
            elif "rank" in message:
                rank = message["rank"]
                if rank not in self.rings:
                    self.rings[rank] = RemoteRing(Who(rank, message["host"], message["pid"]))
                ring = self.rings[rank]
                ring.labels += [one if isinstance(one, str) else tuple(one) for one in message["labels"]]
                ring.taken.append((message["first"], data, self.clock.ahead))
            elif "stopped" in message:
                self.stopped = True
            elif "ended" in message:
                self._ended = True  # it still answers for the clock, and closes after this side
        if alive and not (self._ended and self.clock.known):
            return True
        self.stopped, self.frames.open = True, False
        self.sock.close()
        return False

    def check_clock(self) -> None:
        """Send a question about the clock if one is due."""
        if self.clock.due():
            self.frames.send(self.clock.ask())


class Sender:
    """The link to the monitor that writes the file.

    Args:
        addresses, port, token: where that listens.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, addresses: Sequence[str], port: int, token: str) -> None:
        self.sock = tcp.connect(addresses, port, bytes.fromhex(token))
        self.frames = Frames(self.sock.fileno(), self.sock.fileno())
        self._sent_labels: dict[int, int] = {}

    def commands(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the commands that have come, and whether the link is open; answer for the clock."""
        messages, alive = self.frames.receive()
        now = time.monotonic_ns()
        found = []
        for message, _ in messages:
            if message["do"] == "clock":
                self.frames.send({"sent": message["sent"], "theirs": now})
            else:
                found.append(message)
        return found, alive

    def send(self, reader: RingReader) -> None:
        """Send the records and labels that are new."""
        first, data = reader.take()
        if not data:
            return
        who = reader.who
        reader.load_labels()
        sent = self._sent_labels.get(who.rank, 0)
        self._sent_labels[who.rank] = len(reader.labels)
        self.frames.send({**who._asdict(), "labels": reader.labels[sent:], "first": first}, data)

    def finish(self, seconds: float) -> None:
        """Send what is left, and answer for the clock until the other side closes, for so long at most."""
        # Not the first to close: while a question about the clock is unread, that would be a reset, and the
        # other side would lose the records that it has not read.
        until = time.monotonic() + seconds
        self.frames.send({"ended": True})
        while self.commands()[1] and time.monotonic() < until:
            self.frames.flush()
            time.sleep(0.005)
        self.sock.close()
