"""Tables for TensorFlow: TFRecords as TensorFlow's own reader sees them, and the loader."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd
from ringdance.data import Table
from ringdance.data.tables import Rows
from ringdance.data.tables.writing import TableWriter, write_index

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FIELDS, TABLE, LENGTH = 5, 1 << 40, 300 * SIZE + 7


def rows() -> Rows:
    """Return random rows: ids of any length as varints, labels 0 and 1."""
    random = np.random.default_rng(0)
    ids = random.integers(0, TABLE, (LENGTH, FIELDS)) >> random.integers(0, 41, (LENGTH, FIELDS))
    ids[:, 0] = np.arange(LENGTH)
    values = random.normal(size=ids.shape).astype(np.float32)
    return Rows((random.random(LENGTH) < 0.3).astype(np.float32), ids, values)


def example(number: int, names: tuple[str, str, str], integer: bool = False) -> bytes:
    """Return the record that the public DeepFM scripts write for a row."""
    label, ids, values = (row[number].tolist() for row in rows())
    kinds = (
        tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])) if integer else
        tf.train.Feature(float_list=tf.train.FloatList(value=[label])),
        tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
        tf.train.Feature(float_list=tf.train.FloatList(value=values)),
    )  # fmt: skip
    features = dict(zip(names, kinds, strict=True))
    if number % 2:
        features["comment"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x" * 200]))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@pytest.fixture(scope="module")
def directory() -> Path:
    """Return a table of TFRecords in three files."""
    path = Path(hvd.broadcast_object(tempfile.mkdtemp() if RANK == 0 else None, 0))
    if RANK == 0:
        written = []
        for start, stop in itertools.pairwise((0, 3, LENGTH // 2, LENGTH)):
            with TableWriter(path / f"train-{start}.tfrecord", "tfrecord", stop - start, FIELDS) as file:
                file.write(rows().part(start, stop))
            written.append(file.written)
        write_index(path, "train", "tfrecord", FIELDS, TABLE, written)
    hvd.allreduce(tf.constant(0), name="written")
    return path


def parsed(records: list[bytes]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    result = tf.io.parse_example(records, {
        "label": tf.io.FixedLenFeature((), tf.float32), "ids": tf.io.FixedLenFeature((FIELDS,), tf.int64),
        "values": tf.io.FixedLenFeature((FIELDS,), tf.float32),
    })  # fmt: skip
    return {"ids": result["ids"].numpy(), "values": result["values"].numpy()}, result["label"].numpy()


def test_records_are_those_of_tensorflow(directory: Path, tmp_path: Path) -> None:
    """TensorFlow parses our records, serializes the same bytes, and we read what it writes."""
    wanted = rows()
    table = Table.open(directory)
    names = [str(directory / path.name) for path in table.files]
    records = list(tf.data.TFRecordDataset(names).as_numpy_iterator())
    message = tf.train.Example.FromString(records[4])
    assert message.SerializeToString(deterministic=True) == records[4]
    inputs, labels = parsed(records)
    assert np.array_equal(labels, wanted.labels)
    assert np.array_equal(inputs["ids"], wanted.ids)
    assert np.array_equal(inputs["values"], wanted.values)
    for names, integer in ((("label", "ids", "values"), False), (("label", "feat_ids", "feat_vals"), True)):
        name = str(tmp_path / f"{integer}.tfrecords")
        with tf.io.TFRecordWriter(name) as writer:
            for number in range(60):
                writer.write(example(number, names, integer))
        result = Table.open(name, table_size=TABLE)
        assert (result.fields, len(result)) == (FIELDS, 60)
        for actual, other in zip(result.read(np.arange(60)), wanted.part(0, 60), strict=True):
            assert actual.dtype == other.dtype
            assert actual.tobytes() == other.tobytes()


def test_loader_and_dataset_have_each_row_once(directory: Path) -> None:
    wanted = rows()
    loader = hvd.table_loader(Table.open(directory), 100, seed=1)
    seen = [batch.ids.numpy() for batch in loader if batch.weight]
    dataset = [item[0]["ids"].numpy() for item in hvd.table_dataset(loader)]
    assert all(np.array_equal(*pair) for pair in zip(seen, dataset, strict=False))
    ids = np.concatenate([*itertools.chain(*hvd.allgather_object(seen))])
    assert np.array_equal(ids[np.argsort(ids[:, 0])], wanted.ids)
