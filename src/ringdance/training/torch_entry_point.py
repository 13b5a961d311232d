"""Register the backend "ringdance" with torch.distributed, without importing the backend's dependencies.

PyTorch 2.5 and later versions call ``register`` on import, because it is an entry point in the group
``torch.backends``. With earlier versions, ``import ringdance.torch`` calls it.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the backend, unless this has already been done."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "RINGDANCE"):
        dist.Backend.register_backend("ringdance", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, more: Any = None) -> Any:
    from ringdance.torch.backend import create

    return create(options, more)
