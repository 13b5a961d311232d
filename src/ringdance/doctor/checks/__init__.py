"""The checks by area: ``CHECKS`` of each module."""

from __future__ import annotations

import importlib

from ringdance.doctor.check import AREAS, Check

_MODULES = (
    "hosts", "network", "python", "mpi", "environment", "cpu", "memory", "limits", "disk", "gpu", "leftovers",
)  # fmt: skip
_ALL = [check for name in _MODULES for check in importlib.import_module(f"{__name__}.{name}").CHECKS]
CHECKS: dict[str, Check] = {
    check.name: check for check in sorted(_ALL, key=lambda check: AREAS.index(check.area))
}
"""Every check by name, in the order of the areas."""
