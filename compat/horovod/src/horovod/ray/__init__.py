"""Horovod's Ray executor, provided by Ringdance. Elastic executors are not included."""

from __future__ import annotations

from typing import Any

from ringdance.submit.ray import RayExecutor

__all__ = ["RayExecutor"]


def __getattr__(name: str) -> Any:
    if name in ("ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"):
        raise ImportError(
            f"horovod.ray.{name} is not part of ringdance-horovod, which trains on Ray with a fixed number "
            "of workers: use RayExecutor(settings, num_workers=N)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
