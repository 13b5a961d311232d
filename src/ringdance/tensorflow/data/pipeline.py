"""Images and tables of TFRecords by ``tf.data`` alone, in TensorFlow's threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringdance.data.boxes import CENTRE, RATIO, SCALE
from ringdance.errors import ArgumentError
from ringdance.tensorflow.exchange import plain
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import check_plan

Tensor = Any
_FEATURES = {
    "image/encoded": tf.io.FixedLenFeature((), tf.string),
    "image/class/label": tf.io.FixedLenFeature((), tf.int64),
}


@plain
def image_pipeline(
    files: str | os.PathLike[str] | Sequence[str], batch_size: int, *, image_size: int = 224,
    augment: bool = True, shuffle: int = 10_000, cache: bool = False, first_label: int = 1, seed: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return batches of images and labels from TFRecords, read and decoded by ``tf.data``.

    For training (``augment``) it repeats without end, the ranks' files in another order each time; for
    evaluation it ends, and gives each image to one rank. The ranks may have unequal numbers of samples, and
    an interrupted epoch cannot be continued exactly: use ``image_loader`` for that.

    A collective call: all ranks make it, and it compares their arguments.

    Args:
        files: a pattern such as ``"/data/train-*.tfrecord"``, or names; with the features "image/encoded" and
            "image/class/label".
        batch_size: images for each rank in each batch.
        image_size: height and width, in pixels.
        augment: a random part of each image, by chance flipped; otherwise the centre, and no shuffling.
        shuffle: encoded images among which the next one is drawn.
        cache: keep this rank's encoded images in memory; they are shuffled behind it.
        first_label: the number of the first class in the files, which becomes 0.
        seed: of the orders and the augmentation.
        process_set: the ranks among which files are divided, or single images if there are fewer files.

    Raises:
        ArgumentError: there is no such file.
        MismatchError: the ranks gave different arguments; raised on all.
    """
    data, rank = _records(files, batch_size, augment, shuffle, cache, seed, process_set)
    options = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": not augment}
    data = data.batch(batch_size).map(lambda batch: _parsed(batch, first_label), **options).unbatch()
    if augment:
        seeds = tf.data.Dataset.random(seed=seed + rank).batch(2, drop_remainder=True)
        data = tf.data.Dataset.zip(data, seeds)
        data = data.map(lambda one, draw: (_random_part(one[0], image_size, draw), one[1]), **options)
    else:
        data = data.map(lambda image, label: (_centre(image, image_size), label), **options)
    return data.batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


@plain
def table_pipeline(
    files: str | os.PathLike[str] | Sequence[str], batch_size: int, *, fields: int = 39,
    training: bool = True, shuffle: int = 100_000, cache: bool = False,
    names: Sequence[str] = ("label", "ids", "values"), seed: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return batches of a table's rows from TFRecords, read and parsed by ``tf.data``.

    The elements are a mapping with "ids" (n, fields) int64 and "values" (n, fields) float32, and labels (n,)
    float32: what ``model.fit`` takes. Files are read in parallel, a whole batch is parsed in one call, and
    batches are prepared ahead. Repeats, ends and divides files as ``image_pipeline`` does; ``table_loader``
    is faster and continues an epoch exactly.

    A collective call: all ranks make it, and it compares their arguments.

    Args:
        files: a pattern such as ``"/data/train-*.tfrecord"``, or names.
        batch_size: rows for each rank in each batch.
        fields: pairs of id and value in each row.
        training: without end, in random order; otherwise once, in order.
        shuffle: records among which the next one is drawn.
        cache: keep this rank's records in memory; they are shuffled behind it.
        names: of the features with the label (a float), the ids and the values.
        seed: of the orders.
        process_set: the ranks among which files are divided, or single rows if there are fewer files.

    Raises:
        ArgumentError: there is no such file.
        MismatchError: the ranks gave different arguments; raised on all.
    """
    label, ids, values = names
    features = {
        label: tf.io.FixedLenFeature((), tf.float32), ids: tf.io.FixedLenFeature((fields,), tf.int64),
        values: tf.io.FixedLenFeature((fields,), tf.float32),
    }  # fmt: skip

    def parsed(batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        found = tf.io.parse_example(batch, features)
        return {"ids": found[ids], "values": found[values]}, found[label]

    data, _ = _records(files, batch_size, training, shuffle, cache, seed, process_set)
    data = data.batch(batch_size).map(parsed, num_parallel_calls=tf.data.AUTOTUNE)
    return data.prefetch(tf.data.AUTOTUNE)


def _records(
    files: str | os.PathLike[str] | Sequence[str], batch_size: int, training: bool, shuffle: int, cache: bool,
    seed: int, process_set: ProcessSet,
) -> tuple[Any, int]:
    """Return this rank's records and its rank, after comparing the arguments of all ranks."""
    names = tf.io.gfile.glob(os.fspath(files)) if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise ArgumentError(f"There is no file {files!r}.")
    names = sorted(map(str, names))
    same = {"files": [os.path.basename(name) for name in names], "batch_size": batch_size}
    rank, size = check_plan("pad", same | {"augment or training": training}, process_set)
    data = tf.data.Dataset.from_tensor_slices(names)
    whole = len(names) >= size
    if whole:
        data = data.shard(size, rank)
    if training:
        data = data.shuffle(len(names), seed=seed)
    data = data.interleave(
        tf.data.TFRecordDataset, cycle_length=min(16, len(names)), num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=not training,
    )
    if not whole:
        data = data.shard(size, rank)
    if cache:
        data = data.cache()
    if training:
        data = data.repeat().shuffle(shuffle, seed=seed)
    return data, rank


def _parsed(batch: Tensor, first_label: int) -> tuple[Tensor, Tensor]:
    """Parse the records of a whole batch in one call."""
    features = tf.io.parse_example(batch, _FEATURES)
    return features["image/encoded"], features["image/class/label"] - first_label


def _random_part(data: Tensor, size: int, draw: Tensor) -> Tensor:
    """Decode only a random part, of the same distribution as ``random_box``, and by chance flip it."""
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data), tf.zeros((1, 0, 4)), tf.cast(draw, tf.int64), min_object_covered=0.0,
        aspect_ratio_range=RATIO, area_range=SCALE, max_attempts=10, use_image_if_no_bounding_boxes=True,
    )  # fmt: skip
    image = _resized(data, begin[:2], extent[:2], size)
    return tf.image.stateless_random_flip_left_right(image, tf.cast(draw, tf.int64) + 1)


def _centre(data: Tensor, size: int) -> Tensor:
    shape = tf.io.extract_jpeg_shape(data)[:2]
    side = tf.cast(tf.cast(tf.reduce_min(shape), tf.float32) * CENTRE, tf.int32)
    return _resized(data, (shape - side) // 2, tf.stack([side, side]), size)


def _resized(data: Tensor, begin: Tensor, extent: Tensor, size: int) -> Tensor:
    image = tf.io.decode_and_crop_jpeg(data, tf.concat([begin, extent], 0), channels=3)
    image = tf.image.resize(image, (size, size), antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
