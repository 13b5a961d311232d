"""``ringdance hosts copy``: from here to one host, from there to the next, and so on.

The bytes leave this machine once, however many hosts there are; each host writes what it gets and passes it
on at the same time. What a host has already is not sent. A host that cannot be reached from the one before,
or loses it, gets its part from here, from where it was. The hosts' side of it is ``launch/copy/receive.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.hosts import show
from ringdance.hosts.chain import chained
from ringdance.hosts.members import Members
from ringdance.hosts.source import Entry, Source
from ringdance.hosts.talk import Talk

CHUNK = 1 << 20
_AHEAD = 4 << 20  # bytes that may wait for a host
_MANY = 5000  # entries in one message
_SPARE = 1 << 20  # bytes that a host's file system keeps free
_LONG_S = 3600.0  # for what a host may have to do with many files, such as reading them all


@dataclass
class Outcome:
    """What has become of a host.

    Attributes:
        problem: why there is no more of the copy there, or "".
        bad: what is wrong with single files.
        files: how many were written.
        there: how many were there already.
        bytes: that were written.
        kept: bytes that an earlier copy had left.
    """

    problem: str = ""
    bad: list[str] = field(default_factory=list)
    files: int = 0
    there: int = 0
    bytes: int = 0
    kept: int = 0

    @property
    def failed(self) -> bool:
        """Whether anything is not there as it should be."""
        return bool(self.problem or self.bad)


@dataclass
class _State:
    """A host in the current round.

    Attributes:
        have: bytes that it has of each file, -1 for all.
        open: files that it has not reported yet.
        done: bytes that it has of everything.
        again: whether it needs another round.
    """

    have: list[int] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    done: int = 0
    again: bool = False

    def awaits(self, number: int) -> bool:
        """Whether this file is still to come."""
        return number in self.open and not self.again


class Copy:
    """One copy to several hosts.

    Args:
        members: the hosts, connected.
        source: what to copy.
        direct: send to each host from here, nothing from host to host.
        checksum: whether files count as the same by content instead of by size and time.
        progress: told, now and then, how many bytes of all each host has.
        say: told what a person should know.
    """

    def __init__(
        self,
        members: Members,
        source: Source,
        *,
        direct: bool = False,
        checksum: bool = False,
        progress: Callable[[Mapping[str, int]], None] = lambda have: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._members, self._source, self._direct, self._checksum = members, source, direct, checksum
        self._progress, self._say = progress, say
        self._files = source.files
        self._talk = Talk(members.remotes)
        self._states: dict[str, _State] = {}
        self._rows: list[list[str]] = []
        self._spoiled: set[tuple[str, int]] = set()
        self.outcomes = {host: Outcome(members.problems.get(host, "")) for host in members.names}

    def run(self) -> dict[str, Outcome]:
        """Copy; what has become of each host."""
        waiting = list(self._members.remotes)
        for turn in range(len(waiting) + 2):
            self._prepare(waiting, first=turn == 0)
            self._rows = self._arrange(list(self._states))
            for number, entry in enumerate(self._files):
                self._copy(number, entry)
            while any(state.open and not state.again for state in self._states.values()):
                self._hear(1.0)
            waiting = [host for host, state in self._states.items() if state.again and self._well(host)]
            if not waiting:
                break
        for host in waiting:
            self._fail(host, "its connection to the host before was lost again and again; try --direct")
        for host, said in self._talk.ask({"chore": "copy", "do": "over"}, seconds=_LONG_S).items():
            self._fail(host, said["problem"])
        self._talk.close()
        return self.outcomes

    def _well(self, host: str) -> bool:
        return not self.outcomes[host].problem

    def _fail(self, host: str, problem: str) -> None:
        if problem and self._well(host):
            self.outcomes[host].problem = problem
            if host in self._states:
                self._states[host].open.clear()

    # --- a round -------------------------------------------------------------------------------

    def _prepare(self, hosts: Sequence[str], first: bool) -> None:
        """Tell the hosts what is to come, and hear what they have of it."""
        source, ask = self._source, self._talk.ask
        self._states = {}
        begin = {"chore": "copy", "do": "begin", "root": source.root, "checksum": self._checksum}
        for host, said in ask(begin, hosts=hosts).items():
            self._fail(host, said["problem"])
            self._states[host] = _State()
        free: dict[str, int] = {}
        for at in range(0, len(source.entries), _MANY):
            batch = json.dumps([entry.told() for entry in source.entries[at : at + _MANY]]).encode()
            asked = [host for host in self._states if self._well(host)]
            files = {"chore": "copy", "do": "files"}
            for host, said in ask(files, batch, asked, _LONG_S).items():
                self._fail(host, said["problem"])
                self._states[host].have += said.get("have", [])
                free[host] = said.get("free", 0)
        for host in [host for host in self._states if not self._well(host)]:
            del self._states[host]
        for host, state in self._states.items():
            self._count(host, state, first)
            if first:
                self._check_room(host, state, free.get(host, 0))
        self._show()

    def _count(self, host: str, state: _State, first: bool) -> None:
        sizes = [entry.size for entry in self._files]
        state.open = {number for number, have in enumerate(state.have) if have >= 0}
        state.done = sum(size if have < 0 else have for size, have in zip(sizes, state.have, strict=True))
        if first:
            self.outcomes[host].there = len(state.have) - len(state.open)
            self.outcomes[host].kept = sum(state.have[number] for number in state.open)

    def _check_room(self, host: str, state: _State, free: int) -> None:
        needed = self._source.size - state.done
        if needed and needed + _SPARE > free:
            root = self._source.root
            self._fail(host, f"{show.size(needed)} are to come, but {root} has only {show.size(free)} free")

    def _arrange(self, hosts: Sequence[str]) -> list[list[str]]:
        """Rows of hosts, each of which passes on to the next in its row; this machine alone."""
        here = [host for host in hosts if host in self._members.reach.local]
        others = [host for host in hosts if host not in here and self._states[host].open]
        if self._direct or len(others) < 2:
            rows = [[host] for host in others]
        else:
            rows = chained(self._talk, self._members.remotes, others, self._say)
        return [[host] for host in here] + rows

    # --- files ---------------------------------------------------------------------------------

    def _copy(self, number: int, entry: Entry) -> None:
        """Send a file to all that do not have it."""
        wanting = [host for host, state in self._states.items() if state.awaits(number)]
        if not wanting:
            return
        try:
            digest = self._send(number, entry)
        except OSError as error:
            problem = f"{entry.source}: {error.strerror or error}"
            for host in wanting:
                self.outcomes[host].bad.append(problem)
                self._states[host].open.discard(number)
            return
        for host in wanting:
            self._talk.send(host, {"chore": "copy", "do": "end", "file": number, "digest": digest})

    def _send(self, number: int, entry: Entry) -> str:
        """Send a file's bytes to the first host of each row; its SHA-256.

        Raises:
            OSError: it cannot be read, or is not what it was any more.
        """
        digest, at = hashlib.sha256(), 0
        with open(entry.source, "rb", buffering=0) as file:
            while at < entry.size:
                data = file.read(min(CHUNK, entry.size - at))
                digest.update(data)
                for row in self._rows:
                    have = [s.have[number] for host in row if (s := self._states[host]).awaits(number)]
                    if have and at + len(data) > min(have):
                        chunk = {"chore": "copy", "do": "chunk", "file": number, "at": at}
                        self._talk.send(row[0], chunk, data)
                at += len(data)
                self._wait_for_room()
                if not data:
                    break
            found = os.fstat(file.fileno())
        if (found.st_size, found.st_mtime_ns) != (entry.size, entry.changed):
            raise OSError("it was changed while it was copied; copy again")
        return digest.hexdigest()

    def _wait_for_room(self) -> None:
        self._hear(0.0)
        while any(self._talk.unsent(row[0]) > _AHEAD for row in self._rows):
            self._hear(1.0)

    # --- what the hosts say --------------------------------------------------------------------

    def _hear(self, timeout: float) -> None:
        for host, said, _ in self._talk.step(timeout):
            if said is None:
                self._fail(host, self._talk.lost[host])
                self._cut(host, behind=True)
            elif host in self._states and said.get("did") == "copy":
                self._take(host, self._states[host], said)
        self._show()

    def _take(self, host: str, state: _State, said: Mapping[str, Any]) -> None:
        what = said["what"]
        if what == "got":
            state.done += said["bytes"]
            self.outcomes[host].bytes += said["bytes"]
        elif what == "cut":
            self._cut(host, behind=False)
        elif what == "lost":
            self._cut(host, behind=True)
        elif what == "file" and said["file"] in state.open:
            self._reported(host, state, said)

    def _reported(self, host: str, state: _State, said: Mapping[str, Any]) -> None:
        number, outcome = said["file"], self.outcomes[host]
        state.open.discard(number)
        if not said["problem"]:
            outcome.files += 1
        elif said["again"] and (host, number) not in self._spoiled:
            self._spoiled.add((host, number))  # or what was left of an earlier copy was spoiled
            state.again = True
        else:
            outcome.bad.append(f"{self._files[number].path}: {said['problem']}")

    def _cut(self, host: str, behind: bool) -> None:
        """A host, or only those `behind` it in its row, get nothing any more: another round is for them."""
        for row in self._rows:
            if host in row:
                for other in row[row.index(host) + behind :]:
                    state = self._states[other]
                    state.again = state.again or bool(state.open)

    def _show(self) -> None:
        self._progress({host: state.done for host, state in self._states.items() if self._well(host)})
