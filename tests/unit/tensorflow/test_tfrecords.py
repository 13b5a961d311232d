"""TensorFlow's reader reads our TFRecords, and we read TensorFlow's."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ringdance.data import Dataset
from ringdance.tools.data import main

tf = pytest.importorskip("tensorflow")
PIL = pytest.importorskip("PIL.Image")


def jpeg(number: int) -> bytes:
    data = io.BytesIO()
    PIL.new("RGB", (32 + number, 24), (number * 40, 0, 99)).save(data, "JPEG")
    return data.getvalue()


def test_tensorflow_reads_ours_with_the_features_of_its_scripts(tmp_path):
    for number in range(6):
        path = tmp_path / f"src/n0{number % 3}/{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    words = ["prepare", "imagenet", str(tmp_path / "src"), str(tmp_path / "dst"), "--shards", "2", "-np", "1"]
    assert main(words) == 0
    features = {
        name: tf.io.FixedLenFeature([], kind) for name, kind in {
            "image/encoded": tf.string, "image/class/label": tf.int64, "image/class/synset": tf.string,
            "image/filename": tf.string, "image/format": tf.string,
            "image/height": tf.int64, "image/width": tf.int64, "image/colorspace": tf.string,
            "image/channels": tf.int64,
        }.items()
    }  # fmt: skip
    data = Dataset.open(tmp_path / "dst")
    records = tf.data.TFRecordDataset([str(tmp_path / "dst" / file.name) for file in data.files])
    parsed = [tf.io.parse_single_example(record, features) for record in records]
    assert len(parsed) == 6
    for number, example in enumerate(parsed):
        values = {name.removeprefix("image/"): value.numpy() for name, value in example.items()}
        assert values["encoded"] == data.read(number)
        label = int(data.rows["label"][number])
        assert values["class/label"] == label + 1
        assert values["class/synset"] == data.classes[label].encode()
        assert values["filename"].endswith(b".JPEG")
        shape = tf.io.decode_jpeg(values["encoded"]).shape
        assert (values["height"], values["width"], values["channels"]) == tuple(shape)
        assert (values["format"], values["colorspace"]) == (b"JPEG", b"RGB")


@pytest.mark.parametrize(
    ("label_name", "image_name", "first"),
    [
        ("image/class/label", "image/encoded", 1),
        ("image/class/label", "image/encoded", 0),
        ("label", "image", 0),
    ],
)
def test_an_index_of_tensorflow_s_files(tmp_path, label_name, image_name, first):
    labels = [1, 0, 2, 1] if first == 0 else [2, 1, 3, 1]
    for name in ("train-00000-of-00001", "validation-00000-of-00001"):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            for number, label in enumerate(labels):
                feature = {
                    label_name: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                    image_name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg(number)])),
                    "box": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 0.25])),
                    "image/class/synset": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[b"n%d" % label])
                    ),
                    "none": tf.train.Feature(),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    assert main(["index", str(tmp_path)]) == 0
    for split in ("train", "validation"):
        dataset = Dataset.open(tmp_path, split)
        assert [dataset.read(number) for number in range(4)] == [jpeg(number) for number in range(4)]
        assert list(dataset.rows["label"]) == [label - first for label in labels]
        assert list(dataset.classes) == [f"n{label + first}" for label in range(3)]
    assert main(["verify", str(tmp_path), "--decode"]) == 0
    assert np.unique(Dataset.open(tmp_path).rows["file"]).tolist() == [0]
