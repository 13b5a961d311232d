"""How the Keras binding behaves if a private name of Keras 3 is missing: see ringdance.keras._private."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import ringdance.keras as hvd
from ringdance.errors import ArgumentError
from ringdance.keras import _private

hvd.init()

Optimizer = keras.src.optimizers.base_optimizer.BaseOptimizer


@pytest.mark.parametrize("name", ["_backend_apply_gradients", "_clip_gradients"])
def test_without_hooks_of_accumulation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several passes are refused. A single pass does not need the hooks."""
    for kind in keras.optimizers.SGD.__mro__:
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    with pytest.raises(ArgumentError, match=f"accumulates gradients.*{name}.*one pass per step"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
    with pytest.raises(ArgumentError, match="accumulates gradients"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))
    hvd.DistributedOptimizer(keras.optimizers.SGD())


def test_without_the_number_of_steps() -> None:
    with pytest.raises(ArgumentError, match="_iterations"):
        _private.check_accumulation(SimpleNamespace(_backend_apply_gradients=1, _clip_gradients=1))


def test_without_the_built_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """apply() without variables asks for them."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer.build([weight])
    assert _private.trainable_variables(optimizer) == [weight]
    monkeypatch.delattr(optimizer, "_trainable_variables")
    with pytest.raises(ArgumentError, match="needs trainable_variables"):
        optimizer.apply([keras.ops.ones(2)])


def test_without_accumulators_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done: sums stay, and a class is saved under its own name."""
    assert _private.accumulators(SimpleNamespace()) == []
    monkeypatch.delitem(sys.modules, "keras.src.saving.object_registration")
    _private.register_as(SimpleNamespace, "name")


def test_without_the_choice_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras is left unchanged. Tracing a step raises an error that asks for jit_compile=False."""
    trainer = keras.src.trainers.trainer.Trainer
    monkeypatch.delattr(trainer, "_resolve_auto_jit_compile")
    _private.without_xla(lambda optimizer: True)
    assert not hasattr(trainer, "_resolve_auto_jit_compile")
    if keras.backend.backend() == "tensorflow" and hvd.size() > 1:
        import tensorflow as tf

        function: Any = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
        with pytest.raises(ValueError, match="jit_compile=False"):
            function(tf.ones(2))
