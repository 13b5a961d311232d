"""Links between the monitors on different hosts. They carry records to the monitor that writes the timeline.

The monitor on rank 0's host listens. The monitors on other hosts connect with a token that was sent to them
over MPI. Clocks are compared by means of round trips, see ``Clock``.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ringdance.core.ring import Label, RingReader, Who
from ringdance.host.messages import Frames
from ringdance.host.system import tcp

_FIRST_ROUNDS = 8
_REPEAT_S = 1.0
_TRIPS = 30
_RATES = 1e-4  # maximum difference between the rates of two clocks


class Clock:
    """Offset and rate of another host's monotonic clock relative to this host's clock, from round trips.

    The other clock is read after a query is sent and before the answer arrives. This bounds ``ahead``, even
    if one direction takes longer than the other. Two round trips bound the rate. ``ahead`` is the midpoint of
    the bounds from the last half minute, during which the rate barely changes with the temperature.

    Attributes:
        uncertainty: Uncertainty of ``ahead`` in nanoseconds, until the next round trip.
        known: True once there have been enough round trips to compute ``ahead``.
    """

    def __init__(self) -> None:
        self.uncertainty = 0
        # For each round trip: the other clock's time, and the lower and upper bounds of ``ahead``.
        self._trips: deque[tuple[int, int, int]] = deque(maxlen=_TRIPS)
        self._line = 0, 0.0, 0.0  # the other clock's time, ``ahead`` at that time, slope of ``ahead``
        self._rounds = 0
        self._next = 0.0

    @property
    def known(self) -> bool:
        return self._rounds >= _FIRST_ROUNDS and bool(self._trips)

    def due(self) -> bool:
        """Return True if it is time for a round trip."""
        return time.monotonic() >= self._next

    def ask(self) -> dict[str, Any]:
        """Return a clock query, which must be sent immediately."""
        self._rounds += 1
        self._next = time.monotonic() + (0.0 if self._rounds < _FIRST_ROUNDS else _REPEAT_S)
        return {"do": "clock", "sent": time.monotonic_ns()}

    def answer(self, sent: int, theirs: int, now: int = 0) -> None:
        """Process the answer to a clock query: update the bounds of the rate, then of ``ahead``.

        Args:
            sent: When the query was sent.
            theirs: Time that the other clock showed.
            now: When the answer arrived, or 0 for the current time.
        """
        now = now or time.monotonic_ns()
        trips = self._trips
        trips.append((theirs, theirs - now, theirs - sent))
        origin, base, top = min(trips, key=lambda trip: trip[2] - trip[1])
        others = ((at - origin, least, most) for at, least, most in trips if at != origin)
        rates = [sorted(((least - top) / span, (most - base) / span)) for span, least, most in others]
        slow, fast = max([-_RATES, *(pair[0] for pair in rates)]), min([_RATES, *(pair[1] for pair in rates)])
        low = max(least + slow * (theirs - at) for at, least, _ in trips)
        high = min(most + fast * (theirs - at) for at, _, most in trips)
        if slow > fast or low > high:  # the rate has changed, or the other host was suspended
            trips.clear()
            return self.answer(sent, theirs, now)
        self._line = theirs, (low + high) / 2, (slow + fast) / 2
        self.uncertainty = round((high - low + (fast - slow) * _REPEAT_S * 1e9) / 2)

    def ahead(self, theirs: int) -> float:
        """Return how far the other clock is ahead when it shows ``theirs``, in nanoseconds."""
        at, ahead, rate = self._line
        return ahead + rate * (theirs - at)


class RemoteRing:
    """The records and labels that have arrived from a ring on another host.

    Attributes:
        taken: Results of ``RingReader.take`` on that host, each with ``RingReader.lost``.
    """

    def __init__(self, who: Who) -> None:
        self.who = who
        self.labels: list[Label] = []
        self.taken: list[tuple[int, bytes, int]] = []

    def name(self, number: int) -> Label:
        """Return the label with this number, or "" if it has not arrived."""
        return self.labels[number] if number < len(self.labels) else ""


class Follower:
    """The link to another host's monitor, on the side that writes the file.

    Args:
        sock: An authenticated connection.

    Attributes:
        stopped: True if no more records will arrive before the next ``start`` command, or at all if the link
            is closed.
        ended: True if all records have arrived.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = Frames(sock.fileno(), sock.fileno())
        self.clock = Clock()
        self.rings: dict[int, RemoteRing] = {}
        self.stopped = self.ended = False

    def lacks(self) -> str:
        """Return why the file lacks some of the other monitor's records, or "" if it has all of them."""
        if self.ended and self.clock.known:
            return ""
        if self.ended:
            return "the offset of its clock is unknown"
        if self.frames.open:
            return "it did not arrive in time"
        return "its monitor was killed, or cannot be reached"

    def receive(self) -> bool:
        """Process the messages that have arrived. Closes the link and returns False after the last one."""
        messages, alive = self.frames.receive()
        for message, data in messages:
            if "sent" in message:
                self.clock.answer(message["sent"], message["theirs"])
            elif "rank" in message:
                rank = message["rank"]
                if rank not in self.rings:
                    self.rings[rank] = RemoteRing(Who(rank, message["host"], message["pid"]))
                ring = self.rings[rank]
                ring.labels += [x if isinstance(x, str) else tuple(x) for x in message["labels"]]
                ring.taken.append((message["first"], data, message["lost"]))
            elif "stopped" in message:
                self.stopped = True
            elif "ended" in message:
                self.ended = True  # the other side still answers clock queries, and closes last
        if alive and not (self.ended and self.clock.known):
            return True
        self.stopped, self.frames.open = True, False
        self.sock.close()
        return False

    def names(self) -> str:
        """Return the other host's name, and the ranks on it from which records have arrived."""
        ranks = ", ".join(map(str, sorted(self.rings)))
        host = next((ring.who.host for ring in self.rings.values()), "another host")
        return f"rank {ranks} on {host}" if ranks else host

    def check_clock(self) -> None:
        """Send a clock query if it is time for one."""
        if self.clock.due():
            self.frames.send(self.clock.ask())


class Sender:
    """The link to the monitor that writes the file.

    Args:
        addresses, port, token: Addresses and port on which that monitor listens, and the token to send.

    Raises:
        OSError: The monitor cannot be reached.
    """

    def __init__(self, addresses: Sequence[str], port: int, token: str) -> None:
        self.sock = tcp.connect(addresses, port, bytes.fromhex(token))
        self.frames = Frames(self.sock.fileno(), self.sock.fileno())
        self._sent_labels: dict[int, int] = {}

    def commands(self) -> tuple[list[dict[str, Any]], bool]:
        """Answer clock queries. Returns all other commands received, and whether the link is open."""
        messages, alive = self.frames.receive()
        now = time.monotonic_ns()
        commands = []
        for message, _ in messages:
            if message["do"] == "clock":
                self.frames.send({"sent": message["sent"], "theirs": now})
            else:
                commands.append(message)
        return commands, alive

    def send(self, reader: RingReader) -> None:
        """Send all new records and labels."""
        first, data = reader.take()
        if not data:
            return
        who = reader.who
        reader.load_labels()
        sent = self._sent_labels.get(who.rank, 0)
        self._sent_labels[who.rank] = len(reader.labels)
        message = {**who._asdict(), "labels": reader.labels[sent:], "first": first, "lost": reader.lost}
        self.frames.send(message, data)

    def finish(self, seconds: float) -> None:
        """Mark the end of the records, then answer clock queries until the link is closed or time is up."""
        # This side must not close first. If a clock query were unread, closing would reset the connection,
        # and the other side would lose the records that it has not read yet.
        until = time.monotonic() + seconds
        self.frames.send({"ended": True})
        while self.commands()[1] and time.monotonic() < until:
            self.frames.flush()
            time.sleep(0.005)
        self.sock.close()
