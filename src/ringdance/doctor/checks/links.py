"""What is between two hosts, as measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ringdance.doctor.registry import ERROR, WARNING, Cases, Finding, hosts_check

_SLOW = 100e6 / 8  # bytes/s: less is no network for training
_FAR_S = 0.002


@hosts_check(
    "hosts-connect",
    "network",
    ERROR,
    "whether hosts can connect to each other on any port: firewalls and security groups often let ssh "
    "through only",
    needs=("links",),
)
def connect(cases: Cases) -> Iterator[Finding]:
    """Connections, both ways."""
    good = True
    for one, case in cases.items():
        for other, found in case["links"].items():
            if found["error"]:
                good = False
                yield Finding(
                    f"{one} cannot connect to {other}: {found['error']}",
                    f"allow all TCP ports between the hosts: on {other}: sudo ufw allow from {one} (or "
                    "the security group)",
                    hosts=(one, other),
                )
    if good and any(case["links"] for case in cases.values()):
        yield Finding("all hosts can connect to each other")


@hosts_check(
    "link-bandwidth",
    "network",
    WARNING,
    "bandwidth between each two hosts: one slow link slows every exchange",
    needs=("links",),
)
def bandwidth(cases: Cases) -> Iterator[Finding]:
    """Bandwidth: below 0.1 Gbit/s, or half of what is usual among these hosts."""
    speeds = {
        (one, other): found["bandwidth"]
        for one, case in cases.items()
        for other, found in case["links"].items()
        if found.get("bandwidth")
    }
    if not speeds:
        return
    usual = statistics.median_high(speeds.values())
    slow = {pair: speed for pair, speed in speeds.items() if speed < _SLOW or speed < usual / 2}
    for (one, other), speed in slow.items():
        yield Finding(
            f"{_gigabits(speed)} between {one} and {other}"
            + (f"; {_gigabits(usual)} is usual among these hosts" if usual > 2 * speed else ""),
            "see whether the link, its cable or its traffic is at fault: ethtool, sar -n DEV 1 on "
            f"{one} and {other}",
            hosts=(one, other),
        )
    if not slow:
        low, high = min(speeds.values()), max(speeds.values())
        speed = _gigabits(low) if len(speeds) == 1 else f"{_gigabits(low)} to {_gigabits(high)}"
        yield Finding(f"{speed} between hosts by one connection (measured: {len(speeds)} pairs)")


def _gigabits(speed: float) -> str:
    return f"{speed * 8 / 1e9:.3g} Gbit/s"


@hosts_check(
    "link-latency",
    "network",
    WARNING,
    "time from one host to another: some milliseconds mean different sites or zones",
    needs=("links",),
)
def latency(cases: Cases) -> Iterator[Finding]:
    """Latency."""
    times: dict[tuple[str, ...], float] = {}
    for one, case in cases.items():
        for other, found in case["links"].items():
            if found.get("latency"):
                pair = tuple(sorted((one, other)))
                times[pair] = min(found["latency"], times.get(pair, 60.0))
    far = {pair: seconds for pair, seconds in times.items() if seconds > _FAR_S}
    for pair, seconds in far.items():
        text = f"{seconds * 1e3:.3g} ms from {pair[0]} to {pair[1]}"
        yield Finding(text, "choose hosts of one site (one zone, one placement group)", hosts=pair)
    if times and not far:
        low, high = (f"{seconds * 1e6:.0f} µs" for seconds in (min(times.values()), max(times.values())))
        yield Finding(f"{low} from host to host" if low == high else f"{low} to {high} from host to host")
