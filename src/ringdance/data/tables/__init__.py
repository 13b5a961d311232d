"""Tables of click logs: rows of a label and fields, each a pair of an id and a value. NumPy only."""

from ringdance.data.tables.loader import TableBatch, TableLoader
from ringdance.data.tables.planted import planted
from ringdance.data.tables.rows import Rows
from ringdance.data.tables.table import Table

__all__ = ["Rows", "Table", "TableBatch", "TableLoader", "planted"]
