"""The error of modules that this distribution does not provide."""

from __future__ import annotations

__all__ = ["absent"]


def absent(module: str, advice: str) -> ImportError:
    """Return the error that importing ``module`` raises."""
    return ImportError(f"{module} is not part of ringdance-horovod: {advice}", name=module)
