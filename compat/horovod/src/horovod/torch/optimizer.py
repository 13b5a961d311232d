"""The optimizer whose gradients are reduced over the ranks."""

from ringdance.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
