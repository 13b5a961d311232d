"""Training on n ranks equals training of one process on the joined batch, on whatever backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from nets import ROWS, STEPS, data, far, fit, model, number, same_on_all_ranks

import ringdance.keras as hvd
from ringdance.errors import ArgumentError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))
BACKEND = keras.backend.backend()


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def adamw(**options: Any) -> Any:
    return keras.optimizers.AdamW(0.01, **options)


@pytest.mark.parametrize(("make", "options"), [
    (sgd, {}),
    (adamw, {}),
    (sgd, {"clipnorm": 0.05}),
    (sgd, {"global_clipnorm": 0.05}),
    (sgd, {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 5}),
    (sgd, {"gradient_accumulation_steps": 2}),
    (adamw, {"gradient_accumulation_steps": 4, "global_clipnorm": 0.02}),
    (sgd, {"loss_scale_factor": 1024.0}),
], ids=str)
def test_twenty_steps_of_fit_equal_one_process(make: Any, options: dict[str, Any]) -> None:
    found = fit(hvd.DistributedOptimizer(make(**options)), [RANK]).get_weights()
    assert same_on_all_ranks(found)
    expected = fit(make(**options), ALL).get_weights()
    assert far(expected, model().get_weights()) > 1e-3
    assert far(found, expected) < 1e-6


@pytest.mark.parametrize("wrapped", ["by compile", "before"])
def test_an_overflow_on_one_rank_is_skipped_by_all(wrapped: str) -> None:
    """Loss scaling in float16: the same steps are skipped as in one process; nobody waits."""
    spoiled = {3: SIZE - 1, 7: 0, 8: SIZE - 1}

    def optimizer() -> Any:
        plain = keras.optimizers.SGD(0.4, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(plain) if wrapped == "before" else plain

    # A small loss: the first scale, 32,768, is not to be too much for usual batches.
    options = {"policy": "mixed_float16", "spoiled": spoiled, "compiled": {"loss_weights": [1 / 8]}}
    with_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = fit(hvd.DistributedOptimizer(optimizer()), [RANK], **options)
        reference = fit(optimizer(), ALL, **options)
    finally:
        keras.config.set_dtype_policy(with_policy)
    assert same_on_all_ranks(net.get_weights())
    for one in (net, reference):
        assert isinstance(one.optimizer, keras.optimizers.LossScaleOptimizer)
        assert number(one.optimizer.dynamic_scale) == 2.0**15 / 2 ** len(spoiled)
        assert number(one.optimizer.iterations) == STEPS - len(spoiled)
    assert far(net.get_weights(), model().get_weights()) > 1e-1
    assert far(net.get_weights(), reference.get_weights()) < 2e-2


def test_bfloat16_policy() -> None:
    net = fit(hvd.DistributedOptimizer(sgd()), [RANK], policy="mixed_bfloat16")
    assert same_on_all_ranks(net.get_weights())
    assert far(net.get_weights(), fit(sgd(), ALL, policy="mixed_bfloat16").get_weights()) < 2e-2


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_per_step(average: bool) -> None:
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    found = fit(optimizer, [RANK]).get_weights()
    assert same_on_all_ranks(found)
    plain = keras.optimizers.SGD(0.05 * (1 if average else 2), momentum=0.9, gradient_accumulation_steps=2)
    assert far(found, fit(plain, ALL).get_weights()) < 1e-6


def test_options() -> None:
    expected = fit(sgd(), ALL).get_weights()
    total = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 / SIZE, momentum=0.9), op=hvd.Sum)
    assert far(fit(total, [RANK]).get_weights(), expected) < 1e-6
    divided = hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0)
    assert far(fit(divided, [RANK]).get_weights(), expected) < 1e-6
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        rounded = fit(hvd.DistributedOptimizer(sgd(), compression=compression), [RANK]).get_weights()
        assert same_on_all_ranks(rounded)
        assert far(rounded, expected) < 2e-2
    for eager in (True, False):
        options = {"compiled": {"run_eagerly": eager, "jit_compile": "auto"}}
        assert far(fit(hvd.DistributedOptimizer(sgd()), [RANK], **options).get_weights(), expected) < 1e-6


def one_step(net: Any, optimizer: Any, x: Any, y: Any) -> None:
    """A step as people write it without fit()."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = keras.ops.mean((net(x) - y) ** 2)
        weights = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    elif BACKEND == "torch":
        net.zero_grad()
        keras.ops.mean((net(x) - y) ** 2).backward()
        weights = net.trainable_weights
        optimizer.apply([weight.value.grad for weight in weights], weights)
    else:
        import jax

        def loss_of(trainable: Any) -> Any:
            predicted, _ = net.stateless_call(trainable, [], x)
            return keras.ops.mean((predicted - y) ** 2)

        weights = [one.value for one in net.trainable_variables]
        gradients = jax.grad(loss_of)(weights)
        if not optimizer.built:
            optimizer.build(net.trainable_variables)
        state = [one.value for one in optimizer.variables]
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        variables = [*net.trainable_variables, *optimizer.variables]
        for variable, value in zip(variables, [*weights, *state], strict=True):
            variable.assign(value)


def by_hand(optimizer: Any, ranks: list[int]) -> Any:
    net = model()
    x, y = data(ranks)
    rows = ROWS * len(ranks)
    for at in range(0, STEPS * rows, rows):
        batch = [keras.ops.convert_to_tensor(one[at : at + rows]) for one in (x, y)]
        one_step(net, optimizer, *batch)
    return net.get_weights()


@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 0.05}, {"gradient_accumulation_steps": 2}])
def test_a_loop_of_ones_own(options: dict[str, Any]) -> None:
    found = by_hand(hvd.DistributedOptimizer(sgd(**options)), [RANK])
    assert same_on_all_ranks(found)
    assert far(found, by_hand(sgd(**options), ALL)) < 1e-6


def test_local_variables_stay_local() -> None:
    """The gradient of a local variable is divided by the number of ranks, and not exchanged."""
    net = model()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=net.layers[-1])
    before = net.get_weights()
    variables = net.trainable_variables
    gradients = [keras.ops.ones(one.shape) * (RANK + 1) for one in variables]
    optimizer.apply(gradients, variables)
    steps = [float((old - new).mean()) for old, new in zip(before, net.get_weights(), strict=True)]
    mean, own = (SIZE + 1) / 2, (RANK + 1) / SIZE
    assert steps == pytest.approx([mean, mean, own, own])
    unscaled = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
    unscaled.register_local_var(variables[0])
    before = net.get_weights()
    unscaled.apply([keras.ops.ones(one.shape) * (RANK + 1) for one in variables], variables)
    assert float((before[0] - net.get_weights()[0]).mean()) == pytest.approx(RANK + 1)


@pytest.mark.ranks(3, 4)
def test_process_set() -> None:
    some = hvd.add_process_set([0, 2])
    try:
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some)
        optimizer.apply([keras.ops.ones(3) * (RANK + 1)], [variable])
        assert number(-variable.value[0]) == (2.0 if RANK in (0, 2) else RANK + 1)
    finally:
        hvd.remove_process_set(some)


def test_missing_gradients_and_mistakes() -> None:
    one, other = (keras.Variable(np.zeros(2, "float32")) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply([keras.ops.ones(2) * RANK, None], [one, other])
    assert number(-one.value[0]) == (SIZE - 1) / 2
    assert number(other.value[0]) == 0.0
    with pytest.raises(ArgumentError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ArgumentError, match="Average or Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=2)
    with pytest.raises(ArgumentError, match="predivide"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ArgumentError, match="Keras layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[3])
    with pytest.raises(ArgumentError, match="one of the two"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)
