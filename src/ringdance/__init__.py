"""Ringdance: data-parallel training over many processes.

A training script uses a binding, for instance ``import ringdance.torch as hvd``. Start it with
``ringdance run -np 2 python train.py``, or from Python with ``run``.

Importing this package is cheap and has no side effects: it does not load MPI or a framework, start threads or
install signal handlers. All of that happens in a binding's ``init()``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringdance.launch.api import run
    from ringdance.tools.search import report

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "report", "run"]


# Imported on first use (PEP 562), so that scripts that only train do not import the launcher.
_LAZY = {"report": "ringdance.tools.search", "run": "ringdance.launch.api"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
