"""DeepFM in TensorFlow only, with TensorFlow's strategies for several devices and processes.

All use the same model and step. A batch's ids are first made unique, so that each row is looked up, and its
gradients summed, once. The optimizers are TensorFlow's fused operations on each component of a variable,
because variables under MirroredStrategy and ParameterServerStrategy have several. Keras 3 supports neither.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from strategies import (
    Array,
    Place,
    RecipeSteps,
    Sizes,
    Strategy,
    train,
)

from ringdance.recipes.deepfm import rates

BATCH = (
    tf.TensorSpec([None], tf.float32), tf.TensorSpec([None, None], tf.int64),
    tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32),
)  # fmt: skip


def parts(variable: Any) -> list[Any]:
    """Return the components of a variable. There are several if it is partitioned."""
    return list(getattr(variable, "variables", [variable]))


class Model:
    """DeepFM with Adagrad for its table and Adam for the rest. Created in a strategy's scope.

    Args:
        sizes: Sizes of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        first = sizes.first_values()
        self.table = tf.Variable(first.pop("table"), name="table")
        self.sums = self._filled(self.table, sizes.accumulator)
        self.dense = {name: tf.Variable(value, name=name) for name, value in first.items()}
        self.slots = {name: [self._filled(weight, 0.0) for _ in "mv"] for name, weight in self.dense.items()}

    def _filled(self, variable: Any, value: float) -> list[Any]:
        """Return a variable filled with ``value`` for each component, on the component's device."""
        filled = []
        for part in parts(variable):
            with tf.distribute.get_strategy().extended.colocate_vars_with(part):
                filled.append(tf.Variable(np.full(part.shape, value, np.float32)))
        return filled

    def logits(self, rows: Any, where: Any, values: Any, dense: dict[str, Any]) -> Any:
        """Return logits, (n,), for looked-up rows, the position of each field's row, and factors."""
        linear = tf.gather(rows[:, 0], where) * values
        factors = tf.gather(rows[:, 1:], where) * values[:, :, None]
        pairs = tf.square(tf.reduce_sum(factors, 1)) - tf.reduce_sum(tf.square(factors), 1)
        out = tf.reshape(factors, [-1, self.sizes.fields * self.sizes.dim])
        for number in range(len(self.sizes.hidden)):
            out = tf.nn.relu(tf.matmul(out, dense[f"w{number}"]) + dense[f"b{number}"])
        last = len(self.sizes.hidden)
        deep = tf.matmul(out, dense[f"w{last}"]) + dense[f"b{last}"]
        return dense["bias"] + tf.reduce_sum(linear, 1) + 0.5 * tf.reduce_sum(pairs, 1) + deep[:, 0]

    def _whole(self) -> dict[str, Any]:
        return {name: tf.concat(parts(weight), 0) if len(parts(weight)) > 1 else parts(weight)[0].value()
                for name, weight in self.dense.items()}  # fmt: skip

    def gradients(self, labels: Any, ids: Any, values: Any, weight: Any) -> tuple[list[Any], list[Any]]:
        """Return the gradients of mean loss * weight for the table's components, as rows, and all others."""
        unique, where = tf.unique(tf.reshape(ids, [-1]))
        components = [part for name in self.dense for part in parts(self.dense[name])]
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(parts(self.table), unique)
            logits = self.logits(rows, tf.reshape(where, tf.shape(ids)), values, self._whole())
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)) * weight
        table = parts(self.table)
        gradients = tape.gradient(loss, [*table, *components])
        return gradients[: len(table)], gradients[len(table) :]

    def apply(self, table: Sequence[Any], dense: Sequence[Any], step: Any) -> None:
        """Update the model with gradients of table rows, each once, and of the rest. ``step`` starts at 1."""
        warm = tf.minimum(1.0, step / rates.WARMUP)
        for var, sums, gradient in zip(parts(self.table), self.sums, table, strict=True):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=var.handle, accum=sums.handle, lr=self.sizes.table_rate * warm, epsilon=0.0,
                grad=gradient.values, indices=gradient.indices,
            )  # fmt: skip
        gradients = iter(dense)
        for name, whole in self.dense.items():
            for var, m, v in zip(parts(whole), *self.slots[name], strict=True):
                tf.raw_ops.ResourceApplyAdam(
                    var=var.handle, m=m.handle, v=v.handle, beta1_power=tf.pow(0.9, step),
                    beta2_power=tf.pow(0.999, step), lr=self.sizes.rate * warm, beta1=0.9, beta2=0.999,
                    epsilon=1e-8 * tf.sqrt(1 - tf.pow(0.999, step)), grad=next(gradients),  # as in PyTorch
                )  # fmt: skip

    def predict(self) -> Callable[[Array, Array], Array]:
        """Return a function that maps ids and factors to probabilities."""

        def scores(ids: Any, values: Any) -> Any:
            unique, where = tf.unique(tf.reshape(ids, [-1]))
            rows = tf.nn.embedding_lookup(parts(self.table), unique)
            return tf.sigmoid(self.logits(rows, tf.reshape(where, tf.shape(ids)), values, self._whole()))

        function = tf.function(scores, input_signature=BATCH[1:3])
        return lambda ids, values: function(ids, values).numpy()


def merged(slices: Any) -> Any:
    """Return the same rows, each once, with summed gradients."""
    unique, where = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, where, tf.size(unique)), unique)


class Steps(Strategy):
    """A rank's batches and a function that is called with each batch's arrays, weight and step number."""

    def __init__(self, place: Place, model: Model, function: Any, readers: tuple[int, int] = (0, 1)) -> None:
        super().__init__(place, readers)
        self.predict, self.function, self.steps = model.predict(), function, 0

    def train(self, batch: Any) -> None:
        """Call the function."""
        self.steps += 1
        self.function(batch.labels, batch.ids, batch.values, np.float32(batch.weight), np.float32(self.steps))


def bounds(rows: Any, count: int) -> list[tuple[Any, Any]]:
    """Return the start and end of each of ``count`` parts of a batch."""
    return [(rows * number // count, rows * (number + 1) // count) for number in range(count)]


def devices(place: Place) -> list[str]:
    """Divide the processor into the requested number of logical devices and return their names."""
    count = place.given.devices
    intra, inter = place.given.threads or (place.cores, max(2, count))
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    return [f"CPU:{number}" for number in range(count)]


def tower(place: Place) -> None:
    """Train with towers on the devices of one process, averaging gradients by hand.

    With one device, this is the strategy "single".
    """
    names = devices(place)
    model = Model(place.given.sizes)

    def function(labels: Any, ids: Any, values: Any, weight: Any, step: Any) -> None:
        if len(names) == 1:
            model.apply(*model.gradients(labels, ids, values, weight), step)
            return
        rows = tf.shape(labels)[0]
        gradients = []
        for name, (begin, end) in zip(names, bounds(rows, len(names)), strict=True):
            with tf.device(name):
                share = tf.cast(end - begin, tf.float32) / tf.cast(rows, tf.float32)
                part = labels[begin:end], ids[begin:end], values[begin:end], weight * share
                gradients.append(model.gradients(*part))
        slices = [table[0] for table, _ in gradients]
        rows_ = tf.concat([row.values for row in slices], 0), tf.concat([row.indices for row in slices], 0)
        dense = [tf.add_n(list(each)) for each in zip(*(dense for _, dense in gradients), strict=True)]
        model.apply([merged(tf.IndexedSlices(*rows_))], dense, step)

    train(Steps(place, model, tf.function(function, input_signature=BATCH)), place)


def replica_step(model: Model) -> Callable[..., None]:
    """Return the function that each replica of a tf.distribute strategy runs in a step."""

    def replica(labels: Any, ids: Any, values: Any, weight: Any, step: Any) -> None:
        table, dense = model.gradients(labels, ids, values, weight)
        context = tf.distribute.get_replica_context()
        table = context.all_reduce(tf.distribute.ReduceOp.MEAN, table)
        dense = context.all_reduce(tf.distribute.ReduceOp.MEAN, dense)
        model.apply([merged(slices) for slices in table], dense, step)

    return replica


def mirrored(place: Place) -> None:
    """Train with MirroredStrategy over the devices of one process, in our own training loop."""
    strategy = tf.distribute.MirroredStrategy(devices(place))
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        model = Model(place.given.sizes)
    replica = replica_step(model)

    function = tf.function(lambda *batch: strategy.run(replica, args=batch))

    def divided(labels: Array, ids: Array, values: Array, weight: Any, step: Any) -> None:
        ends = bounds(len(labels), count)

        def part(array: Array) -> Any:
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(array[slice(*ends[context.replica_id_in_sync_group])])
            )

        shares = np.array([(end - begin) * count / len(labels) for begin, end in ends], np.float32)
        weights = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(shares[context.replica_id_in_sync_group])
        )
        function(part(labels), part(ids), part(values), weights, tf.constant(step))

    train(Steps(place, model, divided), place)


def multi_worker_mirrored(place: Place) -> None:
    """Train with MultiWorkerMirroredStrategy. Each rank is a worker, and TF_CONFIG lists all workers."""
    task = {"type": "worker", "index": place.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": place.addresses}, "task": task})
    tf.config.threading.set_intra_op_parallelism_threads(place.cores)
    tf.config.threading.set_inter_op_parallelism_threads(min(2, place.cores))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = Model(place.given.sizes)
    replica = replica_step(model)

    function = tf.function(lambda *batch: strategy.run(replica, args=batch), input_signature=BATCH)

    def total(one: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(one,)), axis=None)

    agreed = tf.function(total, input_signature=[tf.TensorSpec([], tf.int64)])

    class Worker(Steps):
        def agree(self, number: int) -> int:
            return int(agreed(np.int64(0 if place.rank else number)))

    train(Worker(place, model, function, (place.rank, place.size)), place)


def parameter_server(place: Place) -> None:
    """Train with asynchronous ParameterServerStrategy.

    Rank 0 schedules steps, some ranks hold variables, the others train. Each update uses a whole global
    batch, so that there are as many updates as with other strategies. Rank 0 also sends the batches, so that
    each row is used once per epoch, in the same order as with other strategies.
    """
    import ringdance.numpy as hvd

    roles = ["chief"] + ["worker"] * (place.size - 1)
    hosts = list(dict.fromkeys(place.hosts))
    for number in range(place.given.parameter_servers):  # place them on the hosts in turn
        on = [rank for rank, role in enumerate(roles) if role == "worker"]
        roles[next(r for r in on if place.hosts[r] == hosts[number % len(hosts)])] = "ps"
    cluster = {role: [a for a, r in zip(place.addresses, roles, strict=True) if r == role] for role in roles}
    role = roles[place.rank]
    index = roles[: place.rank].count(role)
    if role != "chief":
        here = [r for r, host in zip(roles, place.hosts, strict=True) if host == place.hosts[place.rank]]
        share = max(1, len(os.sched_getaffinity(0)) // max(1, here.count("worker")))
        tf.config.threading.set_intra_op_parallelism_threads(1 if role == "ps" else share)
        server = tf.distribute.Server(tf.train.ClusterSpec(cluster), role, index, protocol="grpc")
        hvd.barrier()  # wait until the chief has finished
        del server
        return
    train(Coordinator(place, cluster, len(cluster["worker"])), place)
    hvd.barrier()


class Coordinator(Strategy):
    """The chief's side of ParameterServerStrategy."""

    def __init__(self, place: Place, cluster: dict[str, list[str]], workers: int) -> None:
        super().__init__(place)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(len(cluster["ps"]))
        strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            model = Model(place.given.sizes)

        def function(labels: Any, ids: Any, values: Any, step: Any) -> None:
            model.apply(*model.gradients(labels, tf.cast(ids, tf.int64), values, 1.0), step)

        self.function, self.predict = tf.function(function), model.predict()
        self.steps, self.ahead = 0, 2 * workers
        self.waiting: deque[Any] = deque()

    def train(self, batch: Any) -> None:
        """Schedule a step on any worker. Wait while each worker has two."""
        self.steps += 1
        arrays = batch.labels, batch.ids.astype(np.int32), batch.values, np.float32(self.steps)
        tensors = [tf.constant(array) for array in arrays]
        self.waiting.append(self.coordinator.schedule(self.function, args=tensors))
        if len(self.waiting) > self.ahead:
            self.waiting.popleft().fetch()

    def finish(self) -> None:
        """Wait until all steps are complete."""
        self.coordinator.join()
        self.waiting.clear()


def ringdance(place: Place) -> None:
    """Train with the step of train_keras.py: ranks average gradients by all-reduce, the table's as rows."""
    tf.config.threading.set_intra_op_parallelism_threads(place.cores)
    tf.config.threading.set_inter_op_parallelism_threads(min(2, place.cores))
    import train_keras  # the recipe's module

    steps = RecipeSteps(place, train_keras.KerasTableModel)
    for number, layer in enumerate(steps.model.layers.deep.layers):
        layer.set_weights([steps.first[f"w{number}"], steps.first[f"b{number}"]])
    train(steps, place)


STRATEGIES = {
    "ringdance": ringdance, "single": tower, "tower": tower, "mirrored": mirrored,
    "multi_worker_mirrored": multi_worker_mirrored, "parameter_server": parameter_server,
}  # fmt: skip
