"""Horovod's import paths, implemented by Ringdance.

``import horovod.torch as hvd`` yields the names of ``ringdance.torch``, and so on. This package holds names,
``horovodrun`` and the tf.data service, which exists only here. Importing it imports no framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

import ringdance

if TYPE_CHECKING:
    from horovod.runner import run

__all__ = ["__version__", "run"]  # __getattr__ provides run.

# The Horovod version whose interface this is, for scripts that compare versions, then Ringdance's own
# version.
__version__ = f"0.28.1+ringdance.{ringdance.__version__}"


def _refuse_the_original() -> None:
    """Raise ImportError if the distribution ``horovod`` is also installed: their files are then mixed."""
    try:
        original = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"horovod {original} and ringdance-horovod are both installed, but they provide the same package: "
        "run `pip uninstall --yes horovod ringdance-horovod`, then install the one you want."
    )


_refuse_the_original()


def __getattr__(name: str) -> object:
    # PEP 562: a script that only trains does not need the launcher.
    if name == "run":
        return importlib.import_module("horovod.runner").run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
