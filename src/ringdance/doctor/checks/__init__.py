"""The checks by area: ``CHECKS`` of each module."""

from __future__ import annotations

from ringdance.doctor.check import AREAS, Check
from ringdance.doctor.checks import (
    cpu,
    disk,
    environment,
    gpu,
    hosts,
    leftovers,
    limits,
    links,
    memory,
    mpi,
    network,
    python,
)

_MODULES = (hosts, network, links, python, mpi, environment, cpu, memory, limits, disk, gpu, leftovers)
CHECKS: dict[str, Check] = {
    check.name: check
    for check in sorted(
        (check for module in _MODULES for check in module.CHECKS), key=lambda check: AREAS.index(check.area)
    )
}
"""Every check by name, in the order of the areas."""
