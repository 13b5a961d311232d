"""Ringdance: data-parallel training over many processes.

A training script uses a binding, for instance ``import ringdance.torch as hvd``. Start it with
``ringdance run -np 2 python train.py``, or from Python with ``run``.

Importing this package is cheap and has no side effects: it loads no MPI and no framework, and starts no
thread and no signal handler. All of that happens in a binding's ``init()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringdance.launch.api import run
    from ringdance.tools.search import report

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "report", "run"]


def __getattr__(name: str) -> object:
    # PEP 562: the launcher is imported on first use, so scripts that only train never import it.
    if name == "run":
        from ringdance.launch.api import run

        return run
    if name == "report":
        from ringdance.tools.search import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
