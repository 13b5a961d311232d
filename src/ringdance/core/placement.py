"""Where a rank is among the ranks of its host and of the others."""

from __future__ import annotations

from typing import NamedTuple

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
