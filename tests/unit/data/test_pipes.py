"""Rows from the bytes of a pipe: formats, framings, portions of any size, ends in the middle of a row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from criteo_lines import criteo_lines, libsvm_lines

from ringdance.data import pipes, planted
from ringdance.data.tables import Rows, criteo
from ringdance.data.tables.examples import encode
from ringdance.errors import ArgumentError

pytest.importorskip("pyarrow")
HEAD = ",".join(criteo.COLUMNS).encode() + b"\n"


@pytest.fixture(scope="module")
def part():
    (part,) = planted(700, seed=1)
    return part


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def read(data: bytes, size: int = 1000) -> Rows:
    found = list(pipes.rows("a pipe", cut(data, size), 39, 5000))
    return Rows(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def forms(part) -> dict[str, bytes]:
    rows = part.rows(5000)
    records, lines = encode(rows), criteo_lines(part)
    half = len(lines[: len(lines) // 2].rpartition(b"\n")[0]) + 1
    return {
        "csv": lines, "tsv without an end": criteo_lines(part, "\t")[:-1],
        "csv of two files with names": HEAD + lines[:half] + HEAD + lines[half:],
        "libsvm": libsvm_lines(rows), "tfrecord": records,
    }  # fmt: skip


@pytest.mark.parametrize("piece", [7001, 1 << 20, None])
def test_all_forms_give_the_same_rows(part, piece, monkeypatch):
    if piece is None:  # the last block is a whole one
        monkeypatch.setattr(pipes, "_PIECE", len(criteo_lines(part)))
    elif piece < 10_000:
        monkeypatch.setattr(pipes, "_PIECE", 5000)
    expected = part.rows(5000)
    for name, data in forms(part).items():
        for a, b in zip(read(data, piece or 65536), expected, strict=True):
            assert a.tobytes() == b.tobytes(), name


def test_errors(part):
    assert list(pipes.rows("a pipe", iter(()), 39, 5000)) == []
    lines, records = criteo_lines(part).splitlines(keepends=True), encode(part.rows(5000))
    lines[600] = b"5" + lines[600][1:]
    for data, message in (
        (b"".join(lines), "a pipe, line 601 .*label 5"),
        (records[:-3], "it ends within record 700"),
        (libsvm_lines(part.rows(9000)), "beyond the table"),
    ):
        with pytest.raises(ArgumentError, match=message):
            list(pipes.rows("a pipe", cut(data, 4096), 39, 5000))
