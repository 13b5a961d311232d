"""Train DeepFM on click logs with Keras on TensorFlow, on the CPUs of any number of hosts.

Rows have Criteo's columns: a label, 13 numbers, 26 categories. Try generated rows first, then real ones:

    ringdance data generate criteo clicks --rows 2000000 --validation 0.05
    ringdance run -np 2 python train_keras.py clicks --export model
    python score.py model clicks --split validation --output scores.tsv

    ringdance data prepare criteo /data/criteo /data/clicks --table-size 10000000 --shards 64
    ringdance run -H node1:16,node2:16 python train_keras.py /data/clicks --checkpoints run1 --patience 3

Start one rank per core: `ringdance run` gives each rank its own. benchmarks/strategies, in a clone of the
repository, compares this with other ways on your hosts.

The model (Guo et al., DeepFM, IJCAI 2017): each field in a row is an id, which selects a row of one embedding
table, and a factor. The table's first column is the linear part. The others give the pairwise products and
the input of the layers. A step reads and updates only the table rows that occur in its batch.

With --checkpoints, run the same command again to continue a run that was stopped or even killed, also with
another number of ranks. No row is used twice in an epoch. Only rank 0 reads and writes that directory. The
model with the best AUC is kept there too. If the table does not fit in one rank's memory, use --sharded.

No rank waits for rank 0: all ranks join in evaluations, and checkpoints are copied, then written in the
background. Only the export is one rank's work. hvd.pause_stall_check() marks it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import loop  # type: ignore[import-not-found]  # in this directory
import numpy as np
import tensorflow as tf

import ringdance.keras as hvd
from ringdance.data import TableBatch

Array = np.ndarray[Any, Any]


class Layers(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model without its embedding table."""

    def __init__(self, fields: int, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.deep = keras.Sequential([
            keras.Input((fields * dim,)),
            *(keras.layers.Dense(width, "relu") for width in hidden),
            keras.layers.Dense(1),  # its bias is also the model's
        ])  # fmt: skip
        self.built = True

    def call(self, rows: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return logits, shape (n,).

        Args:
            rows: Rows of the table, shape (any, 1 + dim).
            places: Index of each field's row in ``rows``, shape (n, fields).
            values: Factors of those rows, shape (n, fields).
        """
        # Two gathers, because slices of the large tensor would be copies.
        linear = tf.gather(rows[:, 0], places) * values
        factors = tf.gather(rows[:, 1:], places) * values[:, :, None]
        pairs = tf.square(tf.reduce_sum(factors, 1)) - tf.reduce_sum(tf.square(factors), 1)
        deep = self.deep(tf.reshape(factors, (-1, self.deep.input_shape[1])))
        return tf.reduce_sum(linear, 1) + 0.5 * tf.reduce_sum(pairs, 1) + deep[:, 0]


class KerasTableModel(loop.TableModel):  # type: ignore[misc]
    """Layers and table, and how they are updated."""

    framework = "tensorflow"

    def __init__(self, given: argparse.Namespace, table: hvd.EmbeddingTable, fields: int) -> None:
        super().__init__()
        keras.utils.set_random_seed(given.seed)  # so that weights are the same on all ranks
        self.table, self.rate = table, given.rate
        self.layers = Layers(fields, given.dim, given.hidden)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(given.rate))
        self.optimizer.build(self.layers.trainable_variables)
        # With None, a single program handles batches of any length, with any number of different ids.
        rows, values = tf.TensorSpec((None, table.columns)), tf.TensorSpec((None, fields))
        labels, number = tf.TensorSpec((None,)), tf.TensorSpec(())
        self._signature = [rows, tf.TensorSpec((None, fields), tf.int64), values]
        self._step = tf.function(self._train, [*self._signature, labels, number, number])
        self._predict = tf.function(self._score, self._signature)

    def step(self, batch: TableBatch, rate: float) -> float:
        """Update the model with one batch. Returns the mean loss of this rank's rows.

        Gradients are averaged over the ranks. With the batch's weight, the result is the mean over the rows
        in the global batch, even if the batch is short or this rank has no rows. The table gets their sum.
        """
        rows, places = self.table.lookup(batch.ids)
        numbers = np.float32(batch.weight), np.float32(self.rate * rate)
        loss, gradient = self._step(rows, places, batch.values, batch.labels, *numbers)
        self.table.update(gradient.numpy() * np.float32(batch.count))
        return float(loss)

    def _train(
        self, rows: Any, places: Any, values: Any, labels: Any, weight: Any, rate: Any
    ) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            logits = self.layers(rows, places, values)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
            weighted = loss * weight
        variables = [variable.value for variable in self.layers.trainable_variables]
        gradient, *gradients = tape.gradient(weighted, [rows, *variables])
        self.optimizer.learning_rate = rate
        self.optimizer.apply(gradients, self.layers.trainable_variables)
        return loss, tf.convert_to_tensor(gradient)  # sums over all places where a row occurs

    def predict(self, ids: Array, values: Array) -> Array:
        """Return probabilities, shape (n,)."""
        rows, places = self.table.lookup(ids, training=False)
        return self._predict(rows, places, values).numpy()

    def _score(self, rows: Any, places: Any, values: Any) -> Any:
        return tf.sigmoid(self.layers(rows, places, values))

    def state(self) -> dict[str, Array]:
        """Return copies of the layers' weights and Adam's state."""
        return {f"v{number}": np.array(variable.numpy()) for number, variable in enumerate(self._variables())}

    def restore(self, state: dict[str, Array]) -> None:
        """Restore the values that ``state`` returned."""
        for number, variable in enumerate(self._variables()):
            variable.assign(state[f"v{number}"])

    def _variables(self) -> list[Any]:
        return [*self.layers.variables, *self.optimizer.variables]

    def export_layers(self, directory: Path) -> None:
        """Write the layers for score.py as a SavedModel, which does not need this file."""
        archive = keras.export.ExportArchive()
        archive.track(self.layers)
        archive.add_endpoint("serve", self.layers.call, self._signature)
        archive.write_out(str(directory / "layers"), verbose=False)


def init() -> None:
    """Join the job. If a rank has one core, running one operation after another is fastest."""
    hvd.init()
    if tf.config.threading.get_intra_op_parallelism_threads() == 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)


if __name__ == "__main__":
    loop.main(__doc__ or "", KerasTableModel, init)
