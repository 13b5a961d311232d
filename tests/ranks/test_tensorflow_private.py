"""How the TensorFlow binding behaves if a private name is missing: see ringdance.tensorflow._private."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd
from ringdance.tensorflow import _private

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def test_without_recording_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """tf.custom_gradient gives the same gradients, eagerly and in functions."""
    monkeypatch.setattr(_private, "RECORDS", False)
    x = tf.Variable(np.arange(2.0 * SIZE))

    def slope(function: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) * (RANK + 1.0))
        return tape.gradient(loss, x)

    average = (SIZE + 1) / 2
    for wrap in (lambda function: function, tf.function):
        total = wrap(lambda: slope(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum")))
        assert total().numpy().tolist() == [average * SIZE] * (2 * SIZE)
        gathered = wrap(lambda: slope(lambda x: hvd.allgather(x, name="gather")))
        assert gathered().numpy().tolist() == [average] * (2 * SIZE)
        rows = wrap(lambda: slope(lambda x: hvd.reducescatter(x, op=hvd.Average, name="rows")))
        expected = [rank + 1.0 for rank in range(SIZE) for _ in range(2)]
        assert rows().numpy().tolist() == expected

    def second() -> Any:
        with tf.GradientTape() as outer:
            inner = slope(lambda x: hvd.allreduce(x, op=hvd.Sum) ** 3)
        return outer.gradient(inner, x)

    assert second().shape == x.shape
    variables = [tf.Variable(tf.ones(300_000)) for _ in range(2)]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(variable) for variable in variables) * (RANK + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    assert [float(item[0]) for item in step()] == [average] * 2


@pytest.mark.ranks(2, 3, 4)
def test_without_the_context_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA itself reports that it does not know the operation."""
    monkeypatch.setattr(_private, "in_xla_context", lambda graph: False)
    function = tf.function(lambda x: hvd.allreduce(x, name="xla"), jit_compile=True)
    with pytest.raises(tf.errors.OpError, match="RingdanceCall"):
        function(tf.ones(3))


class Copying:
    """A tensor without the private name."""

    def __init__(self, tensor: Any) -> None:
        self.numpy = tensor.numpy


def test_without_the_view_of_a_tensor() -> None:
    tensor = tf.constant([1.0, 2.0])
    assert _private.numpy_of(Copying(tensor)).tolist() == [1.0, 2.0]
    assert np.shares_memory(_private.numpy_of(tensor), _private.numpy_of(tensor))


def test_without_the_moments_of_batch_normalization(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.SyncBatchNormalization()
    monkeypatch.delattr(tf.keras.layers.BatchNormalization, "_moments")
    with pytest.raises(NotImplementedError, match="this version of Keras"):
        hvd.SyncBatchNormalization()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("eager.execute", "must_record_gradient"), ("eager.execute", "record_gradient"),
        ("ops.control_flow_util", "GraphOrParentsInXlaContext"), ("profiler.trace", "enabled"),
    ],
)
def test_names_are_looked_up(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module(f"tensorflow.python.{module}"), name)
    spec = importlib.util.find_spec("ringdance.tensorflow._private")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.RECORDS is not module.startswith("eager")
    if name == "GraphOrParentsInXlaContext":
        assert again.in_xla_context(None) is False
    assert again.profiler_running() is (name == "enabled")
