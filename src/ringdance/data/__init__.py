"""Data sets of images in shards: prepare them, look at them, read them. No framework is imported."""

from ringdance.data.dataset import Dataset
from ringdance.data.loader import Batch, Loader, SyntheticLoader

__all__ = ["Batch", "Dataset", "Loader", "SyntheticLoader"]
