"""Both file formats, written and read by this project and by other libraries."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from ringdance.data import Dataset, tfrecord, write
from ringdance.errors import ArgumentError

PIL = pytest.importorskip("PIL.Image")


def jpeg(number: int, height: int = 24, width: int = 32) -> bytes:
    pixels = np.random.RandomState(number).randint(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    PIL.fromarray(pixels).save(data, "JPEG")
    return data.getvalue()


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_what_is_written_is_read(tmp_path, format):
    samples = [(jpeg(number), number % 3) for number in range(7)]
    write(tmp_path, samples, format=format, shards=2, classes=["n1", "n2", "n3"])
    dataset = Dataset.open(tmp_path)
    assert [dataset.read(number) for number in range(7)] == [image for image, _ in samples]
    assert list(dataset.rows["label"]) == [label for _, label in samples]
    assert [file.samples for file in dataset.files] == [4, 3]
    assert all(file.size == (tmp_path / file.name).stat().st_size for file in dataset.files)
    assert list(dataset.classes) == ["n1", "n2", "n3"]
    assert not list(tmp_path.glob(".*"))


def test_tars_have_keys_labels_and_nothing_of_the_machine(tmp_path):
    write(tmp_path, [(jpeg(1), 0), (jpeg(2), 1)], format="webdataset", classes=["n1.x", "n2"])
    with tarfile.open(tmp_path / "train-00000-of-00001.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == [
            "n1_x/00000000.jpg", "n1_x/00000000.cls", "n2/00000001.jpg", "n2/00000001.cls",
        ]  # fmt: skip
        assert {(m.mtime, m.uid, m.uname, m.mode) for m in members} == {(0, 0, "", 0o644)}
        assert tar.extractfile(members[3]).read() == b"1"


def test_a_damaged_record_is_found(tmp_path):
    write(tmp_path, [(jpeg(1), 0), (jpeg(2), 1)])
    path = tmp_path / "train-00000-of-00001.tfrecord"
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    with open(path, "rb") as file, pytest.raises(ArgumentError, match="has a wrong checksum"):
        list(tfrecord.records(file))
    path.write_bytes(data[:-7])
    with open(path, "rb") as file, pytest.raises(ArgumentError, match="ends within record"):
        list(tfrecord.records(file, check=False))


def test_integers_of_any_sign_and_bytes_of_any_length():
    features = {"a": -5, "b": 1 << 40, "c": b"x" * 300, "d": b""}
    image = bytes(70_000)
    parsed = tfrecord.parse(tfrecord.encode(features, "z", image) + image)
    assert {name: value for name, (value, _) in parsed.items()} == features | {"z": image}
    with pytest.raises(ArgumentError, match=r"contain a tf\.train\.Example"):
        tfrecord.parse(b"not a protocol buffer")


def test_a_file_that_is_no_jpeg_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="sample 1 is not a JPEG"):
        write(tmp_path, [(jpeg(1), 0), (b"GIF89a", 0)])
