"""Rows of ``planted`` in the format of Criteo's files: lines of the raw columns."""

from __future__ import annotations

from ringdance.data.tables import criteo
from ringdance.data.tables.planted import PlantedRows
from ringdance.data.tables.rows import Rows


def criteo_lines(part: PlantedRows, delimiter: str = ",") -> bytes:
    """Return the columns as text, one line per row. Needs pyarrow."""
    import pyarrow
    from pyarrow import csv

    columns = [pyarrow.array(part.labels)]
    columns += [pyarrow.array(column, pyarrow.int64(), from_pandas=True) for column in part.numbers.T]
    for text in part.texts:
        buffers = [None, *map(pyarrow.py_buffer, text)]
        columns.append(pyarrow.Array.from_buffers(pyarrow.string(), len(part.labels), buffers))
    stream = pyarrow.BufferOutputStream()
    options = csv.WriteOptions(include_header=False, delimiter=delimiter, quoting_style="none")
    csv.write_csv(pyarrow.table(columns, criteo.COLUMNS), stream, options)
    return bytes(stream.getvalue())


def libsvm_lines(rows: Rows) -> bytes:
    """Return rows as LibSVM lines. Values have 9 digits, so that float32 survives the round trip."""
    made = []
    for label, ids, values in zip(*(array.tolist() for array in rows), strict=True):
        pairs = " ".join(f"{number + 1}:{value:.9g}" for number, value in zip(ids, values, strict=True))
        made.append(f"{label:g} {pairs}\n".encode())
    return b"".join(made)
