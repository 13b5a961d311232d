"""Batch normalization over the batches of all ranks."""

from ringdance.tensorflow import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
