"""Training on n ranks equals one process training on the joined batch, on any backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from nets import (
    ROWS,
    STEPS,
    alone,
    by_rank_zero,
    data,
    far,
    fit,
    model,
    number,
    same_on_all_ranks,
)
from steps import counting_steps
from warned import warned

import ringdance.keras as hvd
from ringdance.errors import ArgumentError, MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))
BACKEND = keras.backend.backend()
every_backend = pytest.mark.every_backend
every_day = every_backend(daily=True)


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def adamw(**options: Any) -> Any:
    return keras.optimizers.AdamW(0.01, **options)


@every_backend
@pytest.mark.parametrize(("differ", "broadcast"), [(False, False), (True, False), (True, True)])
def test_weights_that_differ_are_noticed(differ: bool, broadcast: bool) -> None:
    """Different weights are reported. Each rank's dropout seed may differ."""
    keras.utils.set_random_seed(1 + RANK * differ)
    dropout = keras.layers.Dropout(0.5, seed=RANK)
    net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), dropout, keras.layers.Dense(1)])
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if broadcast else []
    with warned() as texts:
        net.fit(np.ones((12, 5)), np.full((12, 1), RANK), batch_size=1, callbacks=callbacks, verbose=0)
    assert len(texts) == (RANK == 0 and differ and not broadcast)
    assert all("BroadcastGlobalVariablesCallback(0)" in text for text in texts)


@pytest.mark.parametrize(("make", "options"), [
    (sgd, {}),
    (adamw, {}),
    (sgd, {"clipnorm": 0.05}),
    (sgd, {"global_clipnorm": 0.05}),
    (sgd, {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 5}),
    (sgd, {"gradient_accumulation_steps": 2}),
    pytest.param(adamw, {"gradient_accumulation_steps": 4, "global_clipnorm": 0.02}, marks=every_day),
    (sgd, {"loss_scale_factor": 1024.0}),
], ids=str)
def test_twenty_steps_of_fit_equal_one_process(make: Any, options: dict[str, Any]) -> None:
    with counting_steps() as steps:
        result = fit(hvd.DistributedOptimizer(make(**options)), [RANK]).get_weights()
        assert steps() == STEPS // options.get("gradient_accumulation_steps", 1)
    assert same_on_all_ranks(result)
    expected = alone(make(**options), ALL)
    assert far(expected, model().get_weights()) > 1e-3
    assert far(result, expected) < 1e-6


@pytest.mark.ranks(2, 3, 4)
@every_backend
@pytest.mark.parametrize("dropped", [False, True])
def test_other_gradients_on_rank_0_are_refused(dropped: bool) -> None:
    variables = [keras.Variable([1.0, 2.0], name=name) for name in "ab"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    tensor = keras.ops.ones(2)
    pairs = zip([tensor, None] if RANK == 0 else [None, tensor], variables, strict=True)
    with pytest.raises(MismatchError, match=r"Mismatched gradients.*none for variable"):
        optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None or not dropped])
    optimizer.apply_gradients([(None, variables[0]), (tensor * (RANK + 1), variables[1])])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[1]), [0.5 - SIZE / 2, 1.5 - SIZE / 2])


@pytest.mark.parametrize(("policy", "wrapped", "options"), [
    ("mixed_float16", "by compile", {}),
    ("mixed_float16", "before", {}),
    pytest.param(
        "mixed_float16", "by compile", {"gradient_accumulation_steps": 2, "clipnorm": 0.5},
        marks=every_backend,
    ),
    ("mixed_float16", "before", {"gradient_accumulation_steps": 2, "use_ema": True}),
    ("mixed_bfloat16", "before", {}),
    ("mixed_bfloat16", "after", {"global_clipnorm": 0.5}),
], ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(
    policy: str, wrapped: str, options: dict[str, Any]
) -> None:
    """With loss scaling, all ranks skip the steps that one process would skip, and none waits.

    Keras scales the loss itself for float16. For bfloat16 it does so on request, before or after wrapping.
    """
    spoiled = {3: SIZE - 1, 7: 0, 8: SIZE - 1}
    scaling = keras.optimizers.LossScaleOptimizer
    # A small loss, because the first scale, 32,768, must not overflow for usual batches.
    setting = {"policy": policy, "spoiled": spoiled, "compiled": {"loss_weights": [1 / 8]}}

    def trained(distributed: bool) -> tuple[list[Any], float, float]:
        optimizer = keras.optimizers.SGD(0.4, momentum=0.9, **options)
        optimizer = scaling(optimizer) if wrapped == "before" else optimizer
        optimizer = hvd.DistributedOptimizer(optimizer) if distributed else optimizer
        optimizer = scaling(optimizer) if wrapped == "after" else optimizer
        net = fit(optimizer, [RANK] if distributed else ALL, **setting)
        assert isinstance(net.optimizer, scaling)
        updates = net.optimizer.inner_optimizer.iterations  # older versions hide it on the wrapper
        return net.get_weights(), number(net.optimizer.dynamic_scale), number(updates)

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        weights, *counts = trained(True)
        reference, *expected = by_rank_zero(lambda: trained(False))
    finally:
        keras.config.set_dtype_policy(before)
    assert same_on_all_ranks(weights)
    updates = (STEPS - len(spoiled)) // options.get("gradient_accumulation_steps", 1)
    assert counts == expected == [2.0**15 / 2 ** len(spoiled), updates]
    assert far(weights, model().get_weights()) > 2e-2
    assert far(weights, reference) < 2e-2


def test_bfloat16_policy() -> None:
    net = fit(hvd.DistributedOptimizer(sgd()), [RANK], policy="mixed_bfloat16")
    assert same_on_all_ranks(net.get_weights())
    assert far(net.get_weights(), alone(sgd(), ALL, policy="mixed_bfloat16")) < 2e-2
    # Without loss scaling, an overflow reaches the weights, in one process and on all ranks. No rank waits.
    net = fit(hvd.DistributedOptimizer(sgd()), [RANK], policy="mixed_bfloat16", spoiled={3: SIZE - 1})
    assert same_on_all_ranks([np.isfinite(weight) for weight in net.get_weights()])
    assert not np.isfinite(net.get_weights()[0]).all()


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_per_step(average: bool) -> None:
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    result = fit(optimizer, [RANK]).get_weights()
    assert same_on_all_ranks(result)
    plain = keras.optimizers.SGD(0.05 * (1 if average else 2), momentum=0.9, gradient_accumulation_steps=2)
    assert far(result, alone(plain, ALL)) < 1e-6


def test_options() -> None:
    expected = alone(sgd(), ALL)
    total = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 / SIZE, momentum=0.9), op=hvd.Sum)
    assert far(fit(total, [RANK]).get_weights(), expected) < 1e-6
    divided = hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0)
    assert far(fit(divided, [RANK]).get_weights(), expected) < 1e-6
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        rounded = fit(hvd.DistributedOptimizer(sgd(), compression=compression), [RANK]).get_weights()
        assert same_on_all_ranks(rounded)
        assert far(rounded, expected) < 2e-2
    several = {} if BACKEND == "torch" else {"steps_per_execution": 4}  # Keras does not support it for torch
    for compiled in ({"run_eagerly": True}, several):
        options = {"compiled": compiled}
        assert far(fit(hvd.DistributedOptimizer(sgd()), [RANK], **options).get_weights(), expected) < 1e-6


@every_day
@pytest.mark.skipif(BACKEND == "torch", reason="torch.compile needs a C++ compiler and minutes")
def test_jit_compile_true() -> None:
    """XLA compiles JAX's step. It cannot compile TensorFlow's: the error on all ranks says what to use."""

    def train() -> Any:
        return fit(hvd.DistributedOptimizer(sgd()), [RANK], compiled={"jit_compile": True}).get_weights()

    if BACKEND == "tensorflow" and SIZE > 1:
        with pytest.raises(ArgumentError, match="jit_compile=False"):
            train()
    else:
        assert far(train(), alone(sgd(), ALL)) < 1e-6


def one_step(net: Any, optimizer: Any, x: Any, y: Any) -> None:
    """Make a step as users write it without fit()."""
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

        weights = [v.value for v in net.trainable_variables]
        gradients = jax.grad(loss_of)(weights)
        if not optimizer.built:
            optimizer.build(net.trainable_variables)
        state = [v.value for v in optimizer.variables]
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        variables = [*net.trainable_variables, *optimizer.variables]
        for variable, value in zip(variables, [*weights, *state], strict=True):
            variable.assign(value)


def by_hand(optimizer: Any, ranks: list[int]) -> Any:
    net = model()
    x, y = data(ranks)
    rows = ROWS * len(ranks)
    for at in range(0, STEPS * rows, rows):
        batch = [keras.ops.convert_to_tensor(item[at : at + rows]) for item in (x, y)]
        one_step(net, optimizer, *batch)
    return net.get_weights()


@pytest.mark.parametrize("options", [
    pytest.param({}, marks=every_backend), {"global_clipnorm": 0.05}, {"gradient_accumulation_steps": 2},
])
def test_a_loop_of_ones_own(options: dict[str, Any]) -> None:
    result = by_hand(hvd.DistributedOptimizer(sgd(**options)), [RANK])
    assert same_on_all_ranks(result)
    assert far(result, by_rank_zero(lambda: by_hand(sgd(**options), ALL))) < 1e-6


def test_local_variables_stay_local() -> None:
    """A local variable's gradient is divided by the number of ranks and not exchanged."""
    net = model()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=net.layers[-1])
    before = net.get_weights()
    variables = net.trainable_variables
    gradients = [keras.ops.ones(variable.shape) * (RANK + 1) for variable in variables]
    optimizer.apply(gradients, variables)
    steps = [float((old - new).mean()) for old, new in zip(before, net.get_weights(), strict=True)]
    mean, own = (SIZE + 1) / 2, (RANK + 1) / SIZE
    assert steps == pytest.approx([mean, mean, own, own])
    unscaled = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=False)
    unscaled.register_local_var(variables[0])
    before = net.get_weights()
    unscaled.apply([keras.ops.ones(variable.shape) * (RANK + 1) for variable in variables], variables)
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


@every_backend
def test_missing_gradients_and_mistakes() -> None:
    first, other = (keras.Variable(np.zeros(2, "float32")) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply([keras.ops.ones(2) * RANK, None], [first, other])
    assert number(-first.value[0]) == (SIZE - 1) / 2
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
