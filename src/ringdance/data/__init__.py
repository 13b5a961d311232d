"""Prepare and read image data sets and click-log tables. Does not import a framework."""

from ringdance.data.dataset import Dataset
from ringdance.data.loader import Batch, Loader, Synthetic, SyntheticLoader
from ringdance.data.tables import Table, TableBatch, TableLoader, planted
from ringdance.data.writing import write

__all__ = [
    "Batch", "Dataset", "Loader", "Synthetic", "SyntheticLoader", "Table", "TableBatch", "TableLoader",
    "planted", "write",
]
