"""Where a rank is among the ranks of its host and of the others, and on which core."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from ringdance.settings import Settings
from ringdance.transport.base import Transport


class Placement(NamedTuple):
    """Rank and size on this host, and among the ranks with this local rank on all hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def placement(transport: Transport) -> Placement:
    """Return the placement of this rank."""
    rank, group = transport.rank, transport.host_group
    local = group.index(rank)
    hosts = [identity.host for identity in transport.identities]
    cross = [i for i, host in enumerate(hosts) if i == rank or hosts[:i].count(host) == local]
    return Placement(local, len(group), cross.index(rank), len(cross))


def pin(place: Placement, host: str, settings: Settings, report: Callable[[str], None]) -> None:
    """Pin this thread to its core of the setting thread_affinity; report what goes wrong."""
    cores, local = settings.thread_affinity, place.local_rank
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    name = f"thread_affinity ({settings.origin('thread_affinity')})"
    if len(cores) < place.local_size:
        if local == 0:
            ranks = f"the {place.local_size} ranks of {host}"
            report(f"{name} is ignored: it names {len(cores)} cores for {ranks}")
        return
    try:
        os.sched_setaffinity(0, {cores[local]})
    except OSError as error:
        report(f"{name}: core {cores[local]} for local rank {local} of {host}: {error.strerror}")
