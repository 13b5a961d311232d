"""Batch normalization over the batches of all ranks."""

from ringdance.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
