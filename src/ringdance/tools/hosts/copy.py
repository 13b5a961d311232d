"""Copy files from this machine to several hosts, which forward them to each other in a chain.

This machine sends each byte only once, no matter how many hosts there are. Each host writes the data that it
receives and forwards it at the same time. Data that a host already has is not sent again. If a host's
predecessor in the chain cannot connect to it or loses the connection, this machine sends to the host directly
and resumes where the transfer stopped. ``host/copy/receive.py`` implements the receiving side and documents
the messages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.filesize import decimal

from ringdance.tools.hosts.chain import chained
from ringdance.tools.hosts.files import Entry, Source
from ringdance.tools.hosts.host_set import HostSet
from ringdance.tools.hosts.progress import CopyProgress

CHUNK = 1 << 20
_MAX_UNSENT = 4 << 20  # maximum number of bytes queued for a host
_RESERVE = 1 << 20  # bytes to leave free on a host's file system
_LONG_S = 86400.0  # timeout for an answer; a host may have to read all existing files first


@dataclass
class Outcome:
    """The result of the copy to one host.

    Attributes:
        problem: Reason why the copy to this host was aborted, or "" if it was not aborted.
        bad: Descriptions of problems with individual files.
        files: Number of files written.
        there: Number of files that were already up to date on this host.
        bytes: Number of bytes written.
        kept: Number of bytes reused from an interrupted copy.
    """

    problem: str = ""
    bad: list[str] = field(default_factory=list)
    files: int = 0
    there: int = 0
    bytes: int = 0
    kept: int = 0

    @property
    def failed(self) -> bool:
        """True if the copy on this host is incomplete."""
        return bool(self.problem or self.bad)


@dataclass
class _State:
    """The state of a host in the current round.

    Attributes:
        have: For each file, the number of bytes that the host already has, or -1 if the file is complete.
        open: Files for which the host has not reported a result yet.
        done: Total number of bytes that the host has received or already had.
        again: True if the host needs another round.
    """

    have: list[int] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    done: int = 0
    again: bool = False

    def needs(self, number: int) -> bool:
        """Return True if file ``number`` must still be sent to the host in the current round."""
        return number in self.open and not self.again


class Copy:
    """A copy of files to one or more hosts.

    Args:
        hosts: Hosts to copy to, with connected agents.
        source: Entries to copy and their destination.
        progress: Displays the progress.
        direct: If True, this machine sends to each host directly instead of chaining the hosts.
        checksum: If True, compare files by content instead of by size and modification time.
    """

    def __init__(
        self, hosts: HostSet, source: Source, progress: CopyProgress, *, direct: bool, checksum: bool
    ) -> None:
        self._hosts, self._source, self._direct, self._checksum = hosts, source, direct, checksum
        self._progress = progress
        self._files = source.files
        self._states: dict[str, _State] = {}
        self._chains: list[list[str]] = []
        self._corrupted: set[tuple[str, int]] = set()
        self.outcomes = {host: Outcome(str(hosts.problems.get(host, ""))) for host in hosts.names}

    def run(self) -> dict[str, Outcome]:
        """Copy in rounds until each host has all files or has failed. Returns the outcomes by host."""
        left = self._hosts.connected
        for number in range(len(left) + 2):
            self._prepare(left, first=number == 0)
            self._arrange()
            for file, entry in enumerate(self._files):
                self._copy(file, entry)
            while any(state.open and not state.again for state in self._states.values()):
                self._receive(1.0)
            left = [host for host, state in self._states.items() if state.again and self._is_well(host)]
            if not left:
                break
        for host in left:
            self._fail(host, "the previous host repeatedly lost its connection to this host. Pass --direct.")
        self._ask("over", self._hosts.connected)
        return self.outcomes

    def _is_well(self, host: str) -> bool:
        return not self.outcomes[host].problem

    def _fail(self, host: str, problem: str) -> None:
        if problem and self._is_well(host):
            self.outcomes[host].problem = problem
            if host in self._states:
                self._states[host].open.clear()

    def _ask(
        self, do: str, hosts: Sequence[str], payload: bytes = b"", **more: Any
    ) -> dict[str, dict[str, Any]]:
        """Ask hosts to carry out one step of the copy. Returns the answers of the hosts that succeeded."""
        message = {"task": "copy", "do": do, **more}
        answers = self._hosts.ask(dict.fromkeys(hosts, message), payload, _LONG_S)
        for host, answer in answers.items():
            self._fail(host, answer["problem"])
        return {host: answer for host, answer in answers.items() if not answer["problem"]}

    # --- rounds --------------------------------------------------------------------------------

    def _prepare(self, hosts: Sequence[str], first: bool) -> None:
        """Send the list of entries to the hosts, and ask how much of each file they already have."""
        source = self._source
        entries = json.dumps([entry[:-1] for entry in source.entries]).encode()
        begun = self._ask("begin", hosts, entries, root=source.root, checksum=self._checksum)
        self._states = {host: _State(answer["have"]) for host, answer in begun.items()}
        for host, state in self._states.items():
            state.open = {file for file, have in enumerate(state.have) if have >= 0}
            there = zip(self._files, state.have, strict=True)
            state.done = sum(entry.size if have < 0 else have for entry, have in there)
            if first:
                self.outcomes[host].there = len(state.have) - len(state.open)
                self.outcomes[host].kept = sum(state.have[file] for file in state.open)
                needed, free = source.size - state.done, begun[host]["free"]
                if needed and needed + _RESERVE > free:
                    self._fail(
                        host, f"files need {decimal(needed)}, but {source.root} has only {decimal(free)} free"
                    )
        self._show()

    def _arrange(self) -> None:
        """Connect the hosts into chains. If this machine is a destination, it is not part of a chain."""
        local = [host for host in self._states if host in self._hosts.shell.local]
        others = [host for host, state in self._states.items() if host not in local and state.open]
        if self._direct or len(others) < 2:
            chains = [[host] for host in others]
        else:
            chains = chained(self._hosts, others, self._progress.print)
        self._chains = [[host] for host in local] + chains

    # --- files ---------------------------------------------------------------------------------

    def _copy(self, file: int, entry: Entry) -> None:
        """Send a file to all hosts that need it in the current round."""
        receivers = [host for host, state in self._states.items() if state.needs(file)]
        if not receivers:
            return
        try:
            digest = self._send(file, entry)
        except OSError as error:
            for host in receivers:
                self.outcomes[host].bad.append(f"{entry.source}: {error.strerror or error}")
                self._states[host].open.discard(file)
            return
        for host in receivers:
            self._hosts.send(host, {"task": "copy", "do": "end", "file": file, "digest": digest})

    def _send(self, number: int, entry: Entry) -> str:
        """Send a file's contents to the first host of each chain. Returns the file's SHA-256 checksum.

        Raises:
            OSError: The file cannot be read, or it has changed since it was listed.
        """
        digest, at = hashlib.sha256(), 0
        with open(entry.source, "rb", buffering=0) as file:
            while at < entry.size:
                data = file.read(min(CHUNK, entry.size - at))
                digest.update(data)
                for chain in self._chains:
                    have = [s.have[number] for host in chain if (s := self._states[host]).needs(number)]
                    if have and at + len(data) > min(have):
                        chunk = {"task": "copy", "do": "chunk", "file": number, "at": at}
                        self._hosts.send(chain[0], chunk, data)
                at += len(data)
                self._receive(0.0)
                while any(self._hosts.unsent(chain[0]) > _MAX_UNSENT for chain in self._chains):
                    self._receive(1.0)
                if not data:
                    break
            status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (entry.size, entry.changed):
            raise OSError("the file changed during the copy. Copy it again.")
        return digest.hexdigest()

    # --- reports -------------------------------------------------------------------------------

    def _receive(self, timeout: float) -> None:
        for host, message, _ in self._hosts.step(timeout):
            if message is None:
                self._fail(host, str(self._hosts.problems[host]))
                self._cut(host, behind=True)
            elif host in self._states and message.get("answer") == "copy":
                self._handle(host, self._states[host], message)
        self._show()

    def _handle(self, host: str, state: _State, message: Mapping[str, Any]) -> None:
        kind = message["what"]
        if kind == "got":
            state.done += message["bytes"]
            self.outcomes[host].bytes += message["bytes"]
        elif kind in ("cut", "lost"):  # lost the connection to the previous (cut) or next (lost) host
            self._cut(host, behind=kind == "lost")
        elif kind == "file" and message["file"] in state.open:
            self._finish_file(host, state, message)

    def _finish_file(self, host: str, state: _State, message: Mapping[str, Any]) -> None:
        file, outcome = message["file"], self.outcomes[host]
        state.open.discard(file)
        if not message["problem"]:
            outcome.files += 1
        elif message["again"] and (host, file) not in self._corrupted:
            self._corrupted.add((host, file))  # data left by an earlier copy may be corrupted
            state.again = True
        else:
            outcome.bad.append(f"{self._files[file].path}: {message['problem']}")

    def _cut(self, host: str, behind: bool) -> None:
        """Schedule another round for a host and its successors, or for the successors alone if ``behind``."""
        for chain in self._chains:
            if host in chain:
                for other in chain[chain.index(host) + behind :]:
                    state = self._states[other]
                    state.again = state.again or bool(state.open)

    def _show(self) -> None:
        self._progress.show({host: state.done for host, state in self._states.items() if self._is_well(host)})
