"""Data sets of images in shards: prepare them, look at them, read them. No framework is imported."""

from ringdance.data.dataset import Dataset

__all__ = ["Dataset"]
