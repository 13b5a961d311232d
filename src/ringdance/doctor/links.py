"""What is between each two hosts: can they connect, how fast, how soon. Measured with a small timed exchange.

In each turn a host is in one pair only, so that pairs do not share a host's link; n hosts take n - 1 turns,
or as many as fit into the time.
"""

from __future__ import annotations

import json
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ringdance.doctor.gather import command
from ringdance.doctor.link import MARK
from ringdance.doctor.registry import Facts
from ringdance.errors import LaunchError
from ringdance.launch.hosts import LOCAL_NAMES
from ringdance.launch.remote.shell import RemoteShell

_START_S, _ANSWER_S = 20.0, 15.0
_PAIR_S = 0.3


class _End:
    """A running end of links on a host."""

    def __init__(self, host: str, reach: RemoteShell, local: Collection[str]) -> None:
        self.host, self.port = host, 0
        self._process = subprocess.Popen(
            command(host, "link", local, reach), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            before, mark, text = line.partition(MARK)
            if mark and not before.strip():
                self._answers.put(json.loads(text))
        self._answers.put({"error": "the measuring process there has ended"})

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next thing it tells."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return {"error": f"no answer within {seconds:g} s"}

    def say(self, words: Mapping[str, Any]) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # its answer will say that it has ended

    def close(self) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(3.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def turns(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Pairs, so that each host is in one pair of a turn at most, and all pairs come once."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def measure(
    facts: Mapping[str, Facts], reach: RemoteShell, local: Collection[str], seconds: float
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each host, by the other one's name: ``error``, or ``latency`` (s) and ``bandwidth`` (bytes/s).

    Both directions are connected; the bandwidth is measured in one.

    Args:
        facts: of the hosts that answer, for their addresses.
        reach: how they are reached.
        local: those that are this machine.
        seconds: after this time no further turn begins.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {host: {} for host in facts}
    ends: dict[str, _End] = {}
    token = secrets.token_hex(32)
    try:
        for host in facts:
            try:
                ends[host] = _End(host, reach, local)
            except (OSError, LaunchError):
                continue
        for host, end in list(ends.items()):
            port = end.answer(_START_S).get("port")
            if port is None:
                ends.pop(host).close()
                continue
            end.port = port
            end.say({"token": token})
        until = time.monotonic() + seconds
        for pairs in turns(list(ends)):
            if time.monotonic() > until:
                break
            for limit, directed in ((_PAIR_S, pairs), (0.0, [(b, a) for a, b in pairs])):
                for one, other in directed:
                    to = _addresses(other, facts[other])
                    ends[one].say({"to": to, "port": ends[other].port, "seconds": limit})
                for one, other in directed:
                    found[one][other] = ends[one].answer(_ANSWER_S)
    finally:
        for end in ends.values():
            end.close()
    return found


def _addresses(host: str, facts: Facts) -> list[str]:
    """Where a host can be reached: by its name, then by its interfaces."""
    named = [] if host in LOCAL_NAMES else [host]
    interfaces = facts.get("network", {}).get("interfaces", [])
    own = [
        address
        for entry in interfaces
        if entry["up"] and not entry["virtual"] and not entry["loopback"]
        for address, _ in entry["addresses"]
    ]
    return [*named, *own][:4]
