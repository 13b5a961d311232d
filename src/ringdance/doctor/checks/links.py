"""Connections between each two hosts, as measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Hosts

_SLOW = 100e6 / 8  # bytes/s: less is no network for training


def _measured(hosts: Hosts, value: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each pair of hosts for which a value other than 0 and "" was measured, and the value."""
    for one, host in hosts.items():
        for other, found in host["links"].items():
            if found.get(value):
                yield one, other, found[value]


def _connect(hosts: Hosts) -> Iterator[Finding]:
    for one, other, error in _measured(hosts, "error"):
        yield Finding(
            f"{one} cannot connect to {other}: {error}",
            f"allow all TCP ports between the hosts: on {other}: sudo ufw allow from {one} (or "
            "the security group)",
            hosts=(one, other),
        )


def _bandwidth(hosts: Hosts) -> Iterator[Finding]:
    """Judge bandwidth: below 0.1 Gbit/s, or half of the median, is slow."""
    speeds = list(_measured(hosts, "bandwidth"))
    if not speeds:
        return
    median = statistics.median_high(speed for _, _, speed in speeds)
    slow = [entry for entry in speeds if entry[2] < _SLOW or entry[2] < median / 2]
    for one, other, speed in slow:
        yield Finding(
            f"{_gigabits(speed)} between {one} and {other}"
            + (f"; the median of all hosts is {_gigabits(median)}" if median > 2 * speed else ""),
            f"check the link, its cable and its traffic: ethtool, sar -n DEV 1 on {one} and {other}",
            hosts=(one, other),
        )
    if not slow:
        low, high = (_gigabits(limit(speed for _, _, speed in speeds)) for limit in (min, max))
        text = low if low == high else f"{low} to {high}"
        yield Finding(f"{text} between hosts by one connection (measured: {len(speeds)} pairs)")


def _gigabits(speed: float) -> str:
    return f"{speed * 8 / 1e9:.3g} Gbit/s"


CHECKS = (
    Check("hosts-connect", "network", ERROR,
          "whether hosts can connect to each other on any port: firewalls and security groups often let "
          "ssh through only", _connect, ("links",), compares=True),
    Check("link-bandwidth", "network", WARNING,
          "bandwidth between each two hosts: one slow link slows every exchange",
          _bandwidth, ("links",), compares=True),
)  # fmt: skip
