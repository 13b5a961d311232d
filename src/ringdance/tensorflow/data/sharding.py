"""Select this rank's share of a ``tf.data.Dataset`` or of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow.exchange import plain
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import Shard, check_plan, total_of

Dataset: Any = tf.data.Dataset
index_shuffle = tf.random.experimental.index_shuffle
_BLOCK = 4096  # Number of rows to shuffle at a time.


@plain
def shard(
    data: Any, *, ends: str, shuffle: bool | int = False, seed: int = 0, layout: str = "strided",
    process_set: ProcessSet = global_process_set,
) -> Dataset:
    """Return this rank's share of a dataset, as a ``tf.data.Dataset`` of single samples.

    Args:
        data: A ``tf.data.Dataset`` with the same elements in the same order on all ranks, or any structure of
            tensors or arrays with the same number of rows.
        ends: What to do if the samples cannot be divided equally: "pad", "drop" or "join".
        shuffle: True for a different order in each iteration, which requires a ``Dataset`` of known length.
            A number sets the size of the shuffle buffer. The elements are shuffled once before they are
            divided, so each rank keeps its share. See Note [Shuffled shares].
        seed: Seed for shuffling, the same on all ranks.
        layout: "strided" or "contiguous". The latter requires a known number of elements.
        process_set: The ranks among which samples are divided. All of them must call this function.

    Raises:
        ArgumentError: An argument is invalid, or "drop" would leave no samples.
        MismatchError: The ranks passed different arguments. Raised on all ranks.
    """
    if not isinstance(data, tf.data.Dataset):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
        rows = {int(tensor.shape[0]) if tensor.shape.rank else -1 for tensor in tf.nest.flatten(tensors)}
        if len(rows) != 1 or -1 in rows:
            raise ArgumentError(
                "shard(): all tensors must have the same number of rows, but their row counts are "
                f"{sorted(rows)} (-1 for a scalar)."
            )
        own = _shard(tf.data.Dataset.range(rows.pop()), ends, bool(shuffle), seed, layout, process_set, True)
        return own.map(lambda number: tf.nest.map_structure(lambda array: tf.gather(array, number), tensors))
    return _shard(data, ends, shuffle, seed, layout, process_set)


# Note [Shuffled shares]
# tf.data counts the iterators over a dataset and draws a different order for each. If the order in which
# elements are divided depended on this count, a rank that had looked at its first batch or called adapt()
# would use the order of a different epoch, and samples would be silently skipped. Therefore, the elements are
# divided in an order that never changes, and each rank shuffles its own share in each iteration.


def shuffled_rows(plan: Shard, seed: int) -> Dataset:
    """Return this rank's row numbers, in a different order in each iteration, without a shuffle buffer."""
    start, _, step = plan.span()
    count, last = len(plan), tf.constant(plan.length - 1, tf.int64)
    fixed = tf.constant(tf.compat.v1.get_seed(seed), tf.int64)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    keys = seeds.batch(2, drop_remainder=True).take(1)
    blocks = tf.data.Dataset.range(0, count, _BLOCK)

    def block(begin: Any, key: Any) -> Dataset:
        places = tf.range(begin, tf.minimum(begin + _BLOCK, count))
        own = index_shuffle(places, key, tf.constant(count - 1, tf.int64))
        places = (start + step * own) % plan.length  # Padding repeats rows, beginning with the first.
        return tf.data.Dataset.from_tensor_slices(index_shuffle(places, fixed, last))

    return keys.flat_map(lambda key: blocks.flat_map(lambda begin: block(begin, key)))


def _shard(
    data: Dataset, ends: str, shuffle: bool | int, seed: int, layout: str, process_set: ProcessSet,
    rows: bool = False,
) -> Dataset:
    count = int(data.cardinality())
    if count < 0 and (shuffle is True or layout != "strided"):
        raise ArgumentError(
            "shuffle=True and layout='contiguous' require a dataset with a known number of elements. "
            "Apply tf.data.experimental.assert_cardinality first. If the number is unknown, use "
            "layout='strided' and, to shuffle, pass a buffer size as shuffle."
        )
    same = {
        "ends": ends, "layout": layout, "the number of elements": count, "shuffle": shuffle,
        "seed (combined with tf.random.set_seed)": shuffle and tf.compat.v1.get_seed(seed),
    }  # fmt: skip
    rank, size = check_plan(ends, same, process_set)
    check_order(data, size)
    first = data
    buffer = max(count, 1) if shuffle is True else int(shuffle)
    if shuffle and not rows:  # See Note [Shuffled shares].
        data = data.shuffle(buffer, seed, reshuffle_each_iteration=False)
    if count >= 0:
        plan = Shard(count, ends=ends, seed=seed, layout=layout, rank=rank, size=size)
        result = shuffled_rows(plan, seed) if shuffle and rows else _by_number(data, plan, first)
        result = result.apply(tf.data.experimental.assert_cardinality(len(plan)))
    elif count == tf.data.INFINITE_CARDINALITY or ends == "join":
        result = data.shard(size, rank)
    else:
        result = _in_rounds(data, ends, rank, size, first)
    if shuffle and not rows:
        result = result.shuffle(-(-buffer // size), seed)
    options = tf.data.Options()
    options.deterministic = True  # Otherwise, the ranks' orders might differ.
    return result.with_options(options)


def check_order(data: Any, size: int) -> None:
    """Raise ArgumentError if the dataset was shuffled without a seed, so that the ranks' orders differ."""
    if size > 1 and hasattr(data, "_seed") and tf.get_static_value(data._seed + data._seed2) == 0:
        raise ArgumentError(
            "shard(): the dataset was shuffled without a seed, so the ranks' orders differ and some samples "
            "would be skipped. Pass a seed to shuffle(), pass shuffle=False to list_files(), or call shard() "
            "before shuffling."
        )
    for source in data._inputs():
        check_order(source, size)


# Note [Padding]: A script may shuffle a dataset before it is divided. Each iterator then draws a different
# order, which depends on the number of earlier iterators. Therefore, padding must not create an iterator
# only on some ranks, or only when an epoch is read to its end.


def _by_number(data: Dataset, plan: Shard, first: Dataset) -> Dataset:
    """Return this rank's share of a dataset of known length. ``first`` provides elements for padding."""
    total = total_of(plan.length, plan.size, plan.ends)
    if total > plan.length:  # choose_from_datasets creates all iterators up front. See Note [Padding].
        padding = first.take(total - plan.length).repeat()
        choice = tf.data.Dataset.range(total).map(lambda number: tf.cast(number >= plan.length, tf.int64))
        data = tf.data.Dataset.choose_from_datasets([data, padding], choice)
    start, stop, step = plan.span()
    if step == 1:
        return data.skip(start).take(stop - start)
    return data.take(total).shard(plan.size, plan.rank)


def _in_rounds(data: Dataset, ends: str, rank: int, size: int, first: Dataset) -> Dataset:
    """Return this rank's share of a dataset of unknown length: one of every ``size`` elements.

    ``first`` provides elements for padding.
    """
    padding = _in_memory(first.take(size - 1)).repeat() if ends == "pad" else None
    tuples = type(data.element_spec) is tuple

    def own(*parts: Any) -> Dataset:
        row = tf.data.Dataset.zip(parts if tuples else parts[0])
        return (row if padding is None else row.concatenate(padding)).skip(rank).take(1)

    return data.window(size, drop_remainder=ends == "drop").flat_map(own)


def _in_memory(data: Dataset) -> Dataset:
    """Return an in-memory copy of a small dataset or, in a graph, ``data`` itself.

    Iterating over the copy does not create an iterator over ``data``. See Note [Padding].
    """
    if not tf.executing_eagerly():
        return data
    kept = data.take(0)
    for element in data:
        kept = kept.concatenate(tf.data.Dataset.from_tensors(element))
    return kept
