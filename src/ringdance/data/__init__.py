"""Data sets of images and tables of click logs: prepare and read them. No framework is imported."""

from ringdance.data.dataset import Dataset
from ringdance.data.loader import Batch, Loader, Synthetic, SyntheticLoader
from ringdance.data.tables import Table, TableBatch, TableLoader, planted
from ringdance.data.writing import write

__all__ = [
    "Batch", "Dataset", "Loader", "Synthetic", "SyntheticLoader", "Table", "TableBatch", "TableLoader",
    "planted", "write",
]
