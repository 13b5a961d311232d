"""Tables of click logs: four formats give the same batches, in the same order on any number of ranks."""

import copy
import csv
import gc
import json
import pickle
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import libsvm_lines

from ringdance.data import Dataset, Table, TableLoader, tfrecord
from ringdance.data.files import crc32c
from ringdance.data.order import _mixed
from ringdance.data.tables import Rows, criteo, examples
from ringdance.data.tables.rows import BLOCK, PADDING, RowError, dtype, header
from ringdance.data.tables.table import TableFile
from ringdance.data.tables.writing import TableWriter, Written, write_index
from ringdance.errors import ArgumentError

pytest.importorskip("pyarrow")
SIZE = 100_003  # of the embedding table
FORMATS = ("rows", "tfrecord", "libsvm", "csv")
ENDS = {"rows": "npy", "tfrecord": "tfrecord", "libsvm": "libsvm"}
FILES = (700, 0, 512, 1, 130)  # Rows per file. Blocks end within files, and files end within blocks.
ROWS = sum(FILES)


def raw_lines(count, seed=0):
    """Return lines of Criteo's columns, including missing values, negative numbers and long texts."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = [str(random.integers(-2, 10 ** random.integers(1, 6))) for _ in range(13)]
        texts = [f"{random.integers(0, 1 << 32):08x}" for _ in range(26)]
        for place in random.integers(0, 13, 3):
            numbers[place] = ""
        texts[random.integers(26)] = ""
        texts[random.integers(26)] = "Köln-" + "x" * random.integers(0, 20)
        lines.append(",".join([str(random.integers(0, 2)), *numbers, *texts]).encode() + b"\n")
    return lines


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return the same rows as a table in each format, in files of different sizes."""
    directory = tmp_path_factory.mktemp("tables")
    lines, head = raw_lines(ROWS), ",".join(criteo.COLUMNS).encode() + b"\n"
    (directory / "raw.csv").write_bytes(head + b"".join(lines))
    rows = Table.open(directory / "raw.csv", table_size=SIZE).read(np.arange(ROWS))
    for form in FORMATS:
        written, start = [], 0
        for number, count in enumerate(FILES):
            stop = start + count
            if form == "csv":
                first = head if number % 2 else b""
                written.append(text_file(directory / f"csv-{number}.csv", first, lines[start:stop]))
            elif form == "libsvm":
                made = libsvm_lines(rows.part(start, stop)).splitlines(keepends=True)
                written.append(text_file(directory / f"libsvm-{number}.libsvm", b"", made))
            else:
                with TableWriter(directory / f"{form}-{number}.{ENDS[form]}", form, count, 39) as file:
                    for at in range(start, stop, 100):
                        file.write(rows.part(at, min(at + 100, stop)))
                written.append(file.written)
            start = stop
        write_index(directory, form, form, criteo.FIELDS, SIZE, written)
    return {form: Table.open(directory, form) for form in FORMATS}


def text_file(path, first, lines):
    """Write a file of these lines after ``first``. Returns what the index of a table needs."""
    path.write_bytes(first + b"".join(lines))
    ends = len(first) + np.cumsum([0, *map(len, lines)])
    offsets = np.append(ends[:-1:BLOCK], ends[-1]).astype(np.uint64)
    return Written(TableFile(path.name, len(lines), path.stat().st_size), offsets)


def joined(batches):
    return Rows(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in Rows._fields))


def equal(one, other):
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_formats_give_bit_equal_batches_on_any_number_of_ranks(tables, form):
    """Three ranks that divide an epoch, and one that resumes in its middle, see what a single rank sees."""
    reference = TableLoader(tables["rows"], 64, seed=5)
    reference.set_epoch(3)
    whole = list(reference)
    assert len(whole) == len(reference) == -(-ROWS // 64)
    assert sorted(joined(whole).ids[:, 20]) == sorted(tables["rows"].read(np.arange(ROWS)).ids[:, 20])
    loaders = [TableLoader(tables[form], 13, seed=5, rank=rank, size=3, threads=2) for rank in range(3)]
    position = 0
    parts = []
    for loader in loaders:
        loader.set_epoch(3)
    for together in zip(*loaders, strict=True):
        assert len({(batch.position, batch.count) for batch in together}) == 1
        assert together[0].position == position + together[0].count
        assert sum(batch.weight for batch in together) == pytest.approx(3)
        position = together[0].position
        parts += together
        if position > ROWS // 2:
            break
    after = TableLoader(tables[form], 500, seed=5)
    after.set_epoch(3, position)
    parts += after
    assert equal(joined(parts), joined(whole))
    assert parts[-1].position == ROWS


def test_raw_files_open_without_an_index(tables, tmp_path):
    """The format follows from the name or the first bytes.

    A header, a final newline and a space at line ends are optional.
    """
    table = tables["csv"]
    whole = table.read(np.arange(ROWS))
    lines = [line for name in table.files for line in (table.path / name.name).read_bytes().splitlines(True)]
    lines = [line for line in lines if not line.startswith(b"label")]
    (tmp_path / "day_0").write_bytes(b"".join(lines).replace(b",", b"\t")[:-1])
    day = Table.open(tmp_path / "day_0", table_size=SIZE)
    assert (day.format, len(day), equal(day.read(np.arange(ROWS)), whole)) == ("csv", ROWS, True)
    turned = np.roll(np.arange(ROWS), 100)  # read the last line, which has no newline, before the first
    assert equal(day.read(turned), Rows(*(array[turned] for array in whole)))
    for one in ("libsvm", "tfrecord", "rows"):
        data = (tables[one].path / tables[one].files[0].name).read_bytes()
        name = tmp_path / f"raw.{ENDS[one]}"
        name.write_bytes(data.replace(b"\n", b" \n") if one == "libsvm" else data)
        raw = Table.open(name, table_size=SIZE)
        assert (raw.format, raw.fields, len(raw)) == (one, 39, FILES[0])
        assert equal(raw.read(np.arange(FILES[0])), whole.part(0, FILES[0]))


def test_real_rows_of_criteo():
    """13 numbers, some missing or negative, and 26 categories whose ids depend on their column."""
    sample = Path(__file__).parents[4] / "shared" / "data" / "ctr" / "criteo_sample.csv"
    if not sample.exists():
        pytest.skip(f"needs {sample}")
    rows = Table.open(sample, table_size=1_000_000).read(np.arange(200))
    first = next(csv.DictReader(sample.open()))
    numbers = [np.float32(np.log1p(max(float(first[f"I{n}"] or 0), 0))) for n in range(1, 14)]
    assert rows.labels.sum() == 49
    assert rows.values[0].tolist() == [*numbers, *[1] * 26]
    assert (rows.ids[:, :13] == np.arange(13)).all()
    texts = [[row[f"C{n}"] for n in range(1, 27)] for row in csv.DictReader(sample.open())]
    pairs = {(n, text): id for row, ids in zip(texts, rows.ids[:, 13:], strict=True)
             for n, (text, id) in enumerate(zip(row, ids, strict=True))}  # fmt: skip
    for row, ids in zip(texts, rows.ids[:, 13:], strict=True):
        assert [pairs[pair] for pair in enumerate(row)] == ids.tolist()
    assert len(set(pairs.values())) >= 0.995 * len(pairs)
    assert 13 <= min(pairs.values()) < max(pairs.values()) < 1_000_000


def test_the_hash_of_texts_stays_as_it_is():
    """Files that were prepared long ago must keep their ids. The reference hashes one text at a time."""
    texts = [b"", b"68fd1e64", b"a", b"12345678a", b"12345678b", b"1234567812345678x", "Köln".encode(), b"\0"]

    def reference(column, text):
        state = _mixed(_mixed(column + 1) + len(text) & (1 << 64) - 1)
        for start in range(0, max(len(text), 1), 8):
            state = _mixed(state ^ int.from_bytes(text[start : start + 8], "little"))
        return state

    arrow = pytest.importorskip("pyarrow")
    columns = [arrow.array(texts, arrow.binary()), arrow.array([b"x", *texts], arrow.binary())[1:]]
    hashes = criteo.hash_texts([criteo.texts(column) for column in columns])
    assert hashes.tolist() == [reference(column, text) for column in (0, 1) for text in texts]
    assert len(set(hashes.tolist())) == 2 * len(texts)
    assert hashes[1] == 15180856735898547163


def broken(directory, form, content):
    name = directory / f"broken.{ENDS.get(form, form)}"
    name.write_bytes(content)
    table = Table.open(name, table_size=SIZE)
    with pytest.raises(ArgumentError) as caught:
        table.read(np.arange(len(table)))
    return str(caught.value).removeprefix(f"{directory}/broken.")


def test_broken_lines_are_named(tables, tmp_path):
    lines = [line.rstrip() for line in raw_lines(300)]
    head = ",".join(criteo.COLUMNS).encode()

    def text(line):
        return broken(tmp_path, "csv", b"\n".join([head, *lines[:270], line, *lines[270:]]) + b"\n")

    assert text(b"1,2,3") == "csv, line 272: Expected 40 columns, got 3: 1,2,3"
    assert text(b"1," + b"x" * 5 + b"," * 38) == "csv, line 272: column I1: invalid value 'xxxxx'"
    assert text(b"2" + b"," * 39) == "csv, line 272: label 2: expected 0 (no click) or 1 (click)"
    assert text(b"," * 39) == "csv, line 272: the label column is empty: expected 0 or 1"
    assert text(b"") == "csv, line 272: the label column is empty: expected 0 or 1"

    def svm(line):
        return broken(tmp_path, "libsvm", b"0 1:1 7:0.5\n" * 300 + line + b"\n0 1:1 3:1\n")

    pairs = "libsvm, line 301: expected a label and 2 id:value pairs, but there are "
    assert svm(b"1 3:1") == pairs + "1 pairs"
    assert svm(b"1 3:1 4:1 5:1") == pairs + "3 pairs"
    assert svm(b"1 3:1 4:y") == "libsvm, line 301: column value 2: invalid value 'y'"
    beyond = "is out of range: expected 0 to 100002"
    assert svm(b"1 3:1 100004:1") == f"libsvm, line 301: id 100003 (numbered from 0) {beyond}"
    assert svm(b"1 0:1 2:1") == f"libsvm, line 301: id -1 (numbered from 0) {beyond}"
    assert svm(b"1 5:1 2:nan") == "libsvm, line 301: a value is not a finite number"


def test_broken_records_are_named(tables, tmp_path):
    rows = tables["rows"].read(np.arange(300))
    records = examples.encode(rows)
    other = examples.encode(Rows(rows.labels[:1], rows.ids[:1, :38], rows.values[:1, :38]))
    assert broken(tmp_path, "tfrecord", records + other).startswith("tfrecord, record 301: expected 39 ids")
    image = tfrecord.encode({"image/height": 3}, "image/encoded", b"")
    length = len(image).to_bytes(8, "little")
    record = length + tfrecord.masked(crc32c(length)).to_bytes(4, "little") + image + b"0000"
    text = broken(tmp_path, "tfrecord", records + record)
    assert text.startswith("tfrecord, record 301: expected a tf.train.Example with label (one number), ids")
    (tmp_path / "short.tfrecord").write_bytes(records[:-7])
    with pytest.raises(ArgumentError, match=r"short.tfrecord: its last record does not end at byte \d+"):
        Table.open(tmp_path / "short.tfrecord", table_size=SIZE)
    rows.ids[299, 3] = SIZE
    text = broken(tmp_path, "rows", header(300, dtype(39)) + rows.packed().tobytes())
    assert text == "npy, row 300: id 100003 (numbered from 0) is out of range: expected 0 to 100002"


def test_damaged_records_end_in_an_error_or_in_rows(tables):
    """Any damage ends in a ``RowError`` or in rows, never in another exception or an endless loop."""
    rows = tables["rows"].read(np.arange(4))
    records = np.frombuffer(examples.encode(rows), np.uint8)
    starts = examples.bounds(records)
    random = np.random.default_rng(0)
    failed = 0
    for _ in range(300):
        data = np.append(records, np.zeros(PADDING, np.uint8))
        places = random.integers(12, len(records), 3)
        data[places] = random.choice([0, 1, 0x0A, 0x12, 0x7F, 0x80, 0xFF], 3)
        begin = random.integers(12, 60)
        data[begin : begin + 12] |= np.uint8(0x80 * (random.random() < 0.2))
        try:
            assert len(examples.parse(data, starts, 39, SIZE).ids) == 4
        except RowError:
            failed += 1
    assert 100 < failed < 300


def test_files_that_do_not_fit_their_index(tables, tmp_path):
    table = tables["libsvm"]
    assert Table.open(table.path, "libsvm", table_size=SIZE).table_size == SIZE
    with pytest.raises(ArgumentError, match=f"table_size=7: .* was prepared for {SIZE}"):
        Table.open(table.path, "libsvm", table_size=7)
    with pytest.raises(ArgumentError, match=r"split 'test' \(test.json is missing\). Existing splits: csv,"):
        Table.open(table.path, "test")
    with pytest.raises(ArgumentError, match=r"raw.csv is a file without an index\. Pass table_size="):
        Table.open(table.path / "raw.csv")
    copy = tmp_path / "copy"
    shutil.copytree(table.path, copy)
    first = copy / table.files[0].name
    data = first.read_bytes()
    first.write_bytes(data[:-5])
    with pytest.raises(ArgumentError, match=f"{len(data) - 5} bytes, but its index says {len(data)}"):
        Table.open(copy, "libsvm").read(np.arange(3))
    first.write_bytes(data.replace(b"\n", b" ", 1))
    with pytest.raises(ArgumentError, match="contain 255 rows, which does not match the index"):
        Table.open(copy, "libsvm").read(np.arange(3))
    first.unlink()
    with pytest.raises(ArgumentError, match="No such file"):
        Table.open(copy, "libsvm").read(np.arange(3))
    with pytest.raises(ArgumentError, match=r"rank 1: .* has only rows 0 to 1342"):
        TableLoader(table, 8, rank=1, size=2)._read([(np.array([ROWS]), 1.0, 1, 1)], threading.Event())


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_that_was_read_is_pickled_and_copied(tables, form):
    table = tables[form]
    first = table.read(np.arange(3))
    for other in (pickle.loads(pickle.dumps(table)), copy.copy(table)):
        assert equal(other.read(np.arange(3)), first)


@pytest.mark.parametrize("form", ["rows", "tfrecord"])
def test_indexes_of_another_kind_are_named(tables, tmp_path, form):
    directory = tables[form].path
    with pytest.raises(ArgumentError, match=rf"{form}.json is the index of a table. Use ringdance.data"):
        Dataset.open(directory, form)
    about = json.loads((directory / f"{form}.json").read_text()) | {"kind": "other"}
    (tmp_path / "train.json").write_text(json.dumps(about | {"samples": 1, "classes": []}))
    for opened in (Table.open, Dataset.open):
        with pytest.raises(ArgumentError, match=r"train.json is damaged: "):
            opened(tmp_path)


def test_several_arrays_in_an_npy_are_refused(tables, tmp_path):
    shutil.copytree(tables["rows"].path, tmp_path / "copy")
    name = tmp_path / "copy" / tables["rows"].files[0].name
    data = np.load(name)
    for count in range(1, 200):  # until the file is at most as large as the index says
        with open(name, "wb") as file:
            np.savez(file, data[:-count])
        if (padding := tables["rows"].files[0].size - name.stat().st_size) >= 0:
            break
    name.write_bytes(name.read_bytes() + bytes(padding))
    with pytest.raises(ArgumentError, match=f"{name}"):
        Table.open(tmp_path / "copy", "rows").read(np.arange(3))
    with pytest.raises(ArgumentError, match=f"{name}: "):
        Table.open(name, table_size=SIZE)


def test_an_iteration_that_is_left_early_leaves_no_threads(tables):
    def alive():
        return [thread for thread in threading.enumerate() if thread.name.startswith("ringdance-table")]

    until = time.monotonic() + 20
    while alive() and time.monotonic() < until:
        gc.collect()  # loaders of other tests exit first
        time.sleep(0.02)
    loader = TableLoader(tables["csv"], 4, threads=3, prefetch=5)
    batches = iter(loader)
    next(batches)
    assert alive()
    del batches
    assert not alive()
    batches = iter(loader)
    next(batches)
    loader.close()
    assert not list(batches)
    assert not alive()
