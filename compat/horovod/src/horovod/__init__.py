"""Horovod's import paths, by Ringdance.

``import horovod.torch as hvd`` gives ``ringdance.torch``, and so on: this package holds names,
``horovodrun``, and the tf.data service, which has no other names. Importing it imports no framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

import ringdance

if TYPE_CHECKING:
    from horovod.runner import run

__all__ = ["__version__", "run"]  # run: see __getattr__

# The version of Horovod whose interface this is, for scripts that compare; then Ringdance's own.
__version__ = f"0.28.1+ringdance.{ringdance.__version__}"


def _refuse_the_original() -> None:
    """Raise ImportError if the distribution ``horovod`` is installed too: its files and these are mixed."""
    try:
        original = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"horovod {original} and ringdance-horovod are both installed, but they provide the same package: "
        "run `pip uninstall --yes horovod ringdance-horovod`, then install the one that you want."
    )


_refuse_the_original()


def __getattr__(name: str) -> object:
    # PEP 562: those who only train do not need the launcher.
    if name == "run":
        return importlib.import_module("horovod.runner").run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
