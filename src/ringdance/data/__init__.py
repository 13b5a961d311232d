"""Data sets of images in shards: prepare them, look at them, read them. No framework is imported."""

from ringdance.data.dataset import Dataset
from ringdance.data.loader import Batch, Loader, Synthetic, SyntheticLoader
from ringdance.data.writing import write

__all__ = ["Batch", "Dataset", "Loader", "Synthetic", "SyntheticLoader", "write"]
