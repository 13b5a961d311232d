"""This rank's share of a ``tf.data.Dataset`` or of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringdance.errors import ArgumentError
from ringdance.tensorflow.exchange import plain
from ringdance.training.process_sets import ProcessSet, global_process_set
from ringdance.training.sharding import Shard, check_plan, total_of

Dataset: Any = tf.data.Dataset
index_shuffle = tf.random.experimental.index_shuffle
_BLOCK = 4096  # numbers that are shuffled at once


@plain
def shard(
    data: Any, *, ends: str, shuffle: bool | int = False, seed: int = 0, layout: str = "strided",
    process_set: ProcessSet = global_process_set,
) -> Dataset:
    """Return this rank's share of a data set, as a ``tf.data.Dataset`` of single samples.

    Args:
        data: a ``tf.data.Dataset`` with the same elements in the same order on all ranks; or
            tensors or arrays with equally many rows, in any structure.
        ends: "pad", "drop" or "join": what happens if the ranks cannot have equally many samples.
        shuffle: True for another order in each iteration, which needs to know how many elements a ``Dataset``
            has; or the size of the buffer from which elements are drawn. The elements are mixed once before
            they are divided, so a rank keeps its share: see Note [Shuffled shares].
        seed: of the order, equal on all ranks.
        layout: "strided" or "contiguous" (only if the number of elements is known).
        process_set: the ranks among which samples are divided; all of them make this call.

    Raises:
        ArgumentError: an argument is wrong, or "drop" would leave nothing.
        MismatchError: the ranks gave different arguments; raised on all.
    """
    if not isinstance(data, tf.data.Dataset):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
        rows = {int(one.shape[0]) if one.shape.rank else -1 for one in tf.nest.flatten(tensors)}
        if len(rows) != 1 or -1 in rows:
            raise ArgumentError(f"shard(): give tensors with equally many rows. These have {sorted(rows)}.")
        mine = _shard(tf.data.Dataset.range(rows.pop()), ends, bool(shuffle), seed, layout, process_set, True)
        return mine.map(lambda number: tf.nest.map_structure(lambda one: tf.gather(one, number), tensors))
    return _shard(data, ends, shuffle, seed, layout, process_set)


# Note [Shuffled shares]
# tf.data counts the iterators of a data set, and draws another order for each. If the order of an epoch over
# all ranks depended on that number, one rank that looks at its first batch, or calls adapt(), would have the
# order of another epoch from then on: samples would be missed silently. So elements are divided in an order
# that never changes, and each rank shuffles its own share in each iteration.


def shuffled_rows(plan: Shard, seed: int) -> Dataset:
    """Return the numbers of this rank's rows, in another order in each iteration, without a buffer."""
    start, _, step = plan.span()
    count, last = len(plan), tf.constant(plan.length - 1, tf.int64)
    fixed = tf.constant(tf.compat.v1.get_seed(seed), tf.int64)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    keys = seeds.batch(2, drop_remainder=True).take(1)
    blocks = tf.data.Dataset.range(0, count, _BLOCK)

    def block(begin: Any, key: Any) -> Dataset:
        places = tf.range(begin, tf.minimum(begin + _BLOCK, count))
        own = index_shuffle(places, key, tf.constant(count - 1, tf.int64))
        places = (start + step * own) % plan.length  # padding begins again at the start
        return tf.data.Dataset.from_tensor_slices(index_shuffle(places, fixed, last))

    return keys.flat_map(lambda key: blocks.flat_map(lambda begin: block(begin, key)))


def _shard(
    data: Dataset, ends: str, shuffle: bool | int, seed: int, layout: str, process_set: ProcessSet,
    rows: bool = False,
) -> Dataset:
    count = int(data.cardinality())
    if count < 0 and (shuffle is True or layout != "strided"):
        raise ArgumentError(
            "shuffle=True and layout='contiguous' need to know how many elements there are: give a buffer's "
            "size as a number, use 'strided', or apply tf.data.experimental.assert_cardinality first."
        )
    same = {
        "ends": ends, "layout": layout, "the number of elements": count, "shuffle": shuffle,
        "seed (with that of tf.random.set_seed)": shuffle and tf.compat.v1.get_seed(seed),
    }  # fmt: skip
    rank, size = check_plan(ends, same, process_set)
    check_order(data, size)
    first = data
    buffer = max(count, 1) if shuffle is True else int(shuffle)
    if shuffle and not rows:  # see Note [Shuffled shares]
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
    options.deterministic = True  # orders that differ between ranks would miss samples
    return result.with_options(options)


def check_order(data: Any, size: int) -> None:
    """Raise ArgumentError if a step before draws an order without a seed: another one on each rank."""
    if size > 1 and hasattr(data, "_seed") and tf.get_static_value(data._seed + data._seed2) == 0:
        raise ArgumentError(
            "shard(): the data set was shuffled without a seed, differently on each rank: samples would be "
            "missed. Give a seed to its shuffle(), shuffle=False to its list_files(), or shard() first."
        )
    for source in data._inputs():
        check_order(source, size)


# Note [Padding]: a script may shuffle a data set before it is divided. Each iterator then draws another
# order, and the next one depends on how many were made. So padding must not make one on some ranks only, or
# only where an epoch is read to its end.


def _by_number(data: Dataset, plan: Shard, first: Dataset) -> Dataset:
    """Distribute a data set of known length; ``first``: its elements in any order, for padding."""
    total = total_of(plan.length, plan.size, plan.ends)
    if total > plan.length:  # choose_from_datasets makes its iterators at once; see Note [Padding]
        padding = first.take(total - plan.length).repeat()
        choice = tf.data.Dataset.range(total).map(lambda number: tf.cast(number >= plan.length, tf.int64))
        data = tf.data.Dataset.choose_from_datasets([data, padding], choice)
    start, stop, step = plan.span()
    if step == 1:
        return data.skip(start).take(stop - start)
    return data.take(total).shard(plan.size, plan.rank)


def _in_rounds(data: Dataset, ends: str, rank: int, size: int, first: Dataset) -> Dataset:
    """Distribute a data set of unknown length in rounds of ``size`` elements; ``first``: as for the other."""
    padding = _in_memory(first.take(size - 1)).repeat() if ends == "pad" else None
    tuples = type(data.element_spec) is tuple

    def own(*parts: Any) -> Dataset:
        row = tf.data.Dataset.zip(parts if tuples else parts[0])
        return (row if padding is None else row.concatenate(padding)).skip(rank).take(1)

    return data.window(size, drop_remainder=ends == "drop").flat_map(own)


def _in_memory(data: Dataset) -> Dataset:
    """Return a data set of the same few elements that makes no iterator of the given one."""
    if not tf.executing_eagerly():
        return data
    kept = data.take(0)
    for one in data:
        kept = kept.concatenate(tf.data.Dataset.from_tensors(one))
    return kept
