"""Train DeepFM on click logs with Keras on TensorFlow, on the CPUs of any number of hosts.

The input has Criteo's columns: a label, 13 numbers and 26 categories. Try generated rows first, then real
data:

    ringdance data generate criteo clicks --rows 2000000 --validation 0.05
    ringdance run -np 2 python train_keras.py clicks --export model
    python score.py model clicks --split validation --output scores.tsv

    ringdance data prepare criteo /data/criteo /data/clicks --table-size 10000000 --shards 64
    ringdance run -H node1:16,node2:16 python train_keras.py /data/clicks --checkpoints run1 --patience 3

Start one rank per core. `ringdance run` gives each rank its own core. To compare this setup with others on
your hosts, run benchmarks/strategies in a clone of the repository.

The model is DeepFM (Guo et al., IJCAI 2017). Each field in a row is an id, which selects a row of the
embedding table, and a value, which scales it. The table's first column is the linear part. The other columns
are used for the pairwise products and as the input of the layers. A step reads and updates only the table
rows that occur in its batch.

With --checkpoints, the same command resumes a run that was stopped or killed, even with a different number of
ranks. No row is used twice in an epoch. Only rank 0 reads and writes the checkpoint directory, which also
contains the model with the best AUC. If the table does not fit in one rank's memory, use --sharded.

Ranks do not wait for rank 0, except during the export. All ranks take part in evaluations, and checkpoints
are written in the background. Only rank 0 exports the model, within hvd.pause_stall_check() to suppress stall
warnings on the other ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import loop  # type: ignore[import-not-found]  # in this directory

if __name__ == "__main__":
    # Handle --help and invalid options before importing TensorFlow, which takes several seconds.
    loop.options(__doc__ or "")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

import ringdance.keras as hvd
from ringdance.data import TableBatch

Array = np.ndarray[Any, Any]


class Layers(keras.Model):  # type: ignore[misc]  # Keras has no types
    """DeepFM without the embedding table, whose rows are an input."""

    def __init__(self, fields: int, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.deep = keras.Sequential([
            keras.Input((fields * dim,)),
            *(keras.layers.Dense(width, "relu") for width in hidden),
            keras.layers.Dense(1),  # its bias is also the bias of the model
        ])  # fmt: skip
        self.built = True

    def call(self, rows: tf.Tensor, places: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Return logits, shape (n,).

        Args:
            rows: The distinct table rows that occur in the batch, shape (m, 1 + dim).
            places: Index of each field's table row in ``rows``, shape (n, fields).
            values: Factor for each field's table row, shape (n, fields).
        """
        # Gather twice, because slicing the result of a single gather would copy it.
        linear = tf.gather(rows[:, 0], places) * values
        factors = tf.gather(rows[:, 1:], places) * values[:, :, None]
        pairs = tf.square(tf.reduce_sum(factors, 1)) - tf.reduce_sum(tf.square(factors), 1)
        deep = self.deep(tf.reshape(factors, (-1, self.deep.input_shape[1])))
        return tf.reduce_sum(linear, 1) + 0.5 * tf.reduce_sum(pairs, 1) + deep[:, 0]


class KerasTableModel(loop.TableModel):  # type: ignore[misc]
    """This rank's layers, embedding table and optimizers."""

    framework = "tensorflow"

    def __init__(self, given: argparse.Namespace, table: hvd.EmbeddingTable, fields: int) -> None:
        super().__init__()
        keras.utils.set_random_seed(given.seed)  # all ranks start with the same weights
        self.table, self.rate = table, given.rate
        self.layers = Layers(fields, given.dim, given.hidden)
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(given.rate))
        self.optimizer.build(self.layers.trainable_variables)
        self._variables = [*self.layers.variables, *self.optimizer.variables]
        # Dimensions of None avoid retracing when the number of rows or of distinct ids changes.
        rows, values = tf.TensorSpec((None, table.columns)), tf.TensorSpec((None, fields))
        labels, number = tf.TensorSpec((None,)), tf.TensorSpec(())
        self._signature = [rows, tf.TensorSpec((None, fields), tf.int64), values]
        self._step = tf.function(self._train, [*self._signature, labels, number, number])
        self._predict = tf.function(self._score, self._signature)

    def step(self, batch: TableBatch, rate: float) -> float:
        """Update the model with one batch. Returns the mean loss of this rank's rows.

        Each rank's loss is scaled by ``batch.weight``, so averaging the gradients over the ranks gives the
        mean over all rows in the global batch, even if the batch is short or this rank has no rows.
        The gradients of the embedding table are summed over these rows instead.
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
        return loss, tf.convert_to_tensor(gradient)  # convert IndexedSlices, summing repeated rows

    def predict(self, ids: Array, values: Array) -> Array:
        """Return probabilities, shape (n,)."""
        rows, places = self.table.lookup(ids, training=False)
        return self._predict(rows, places, values).numpy()

    def _score(self, rows: Any, places: Any, values: Any) -> Any:
        return tf.sigmoid(self.layers(rows, places, values))

    def state(self) -> dict[str, Array]:
        """Return copies of the layers' weights and of Adam's state."""
        return {f"v{number}": np.array(variable.numpy()) for number, variable in enumerate(self._variables)}

    def restore(self, state: dict[str, Array]) -> None:
        """Restore a state returned by ``state``."""
        for number, variable in enumerate(self._variables):
            variable.assign(state[f"v{number}"])

    def export_layers(self, directory: Path) -> None:
        """Write the layers as a SavedModel, which score.py can run without this file."""
        archive = keras.export.ExportArchive()
        archive.track(self.layers)
        archive.add_endpoint("serve", self.layers.call, self._signature)
        archive.write_out(str(directory / "layers"), verbose=False)


def init() -> None:
    """Initialize Ringdance. On a single core, run one TensorFlow operation at a time, which is fastest."""
    hvd.init()
    if tf.config.threading.get_intra_op_parallelism_threads() == 1:
        tf.config.threading.set_inter_op_parallelism_threads(1)


if __name__ == "__main__":
    loop.main(__doc__ or "", KerasTableModel, init)
