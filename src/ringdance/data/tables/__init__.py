"""Tables of click logs. Each row has a label and (id, value) pairs, called fields. Needs only NumPy."""

from ringdance.data.tables.loader import TableBatch, TableLoader
from ringdance.data.tables.planted import planted
from ringdance.data.tables.rows import Rows
from ringdance.data.tables.table import Table

__all__ = ["Rows", "Table", "TableBatch", "TableLoader", "planted"]
