"""Networks in both of Flax's styles, trained with ringdance.jax on n ranks as on one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringdance.jax as hvd

pytest.importorskip("flax")

from flax import linen, nnx
from flax.training.train_state import TrainState

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ALL = list(range(SIZE))
STEPS = 6


def batch(step: int, ranks: list[int]) -> tuple[Any, Any]:
    x = jnp.concatenate([jax.random.normal(jax.random.key(100 * step + rank), (4, 3)) for rank in ranks])
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


def with_linen(tx: Any, ranks: list[int], seed: int) -> list[Any]:
    net = linen.Sequential([linen.Dense(8), linen.tanh, linen.Dense(1)])
    params = net.init(jax.random.key(seed), jnp.ones((1, 3)))
    params = hvd.broadcast_parameters(params, root_rank=0)
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean((state.apply_fn(params, x) - y) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    for number in range(STEPS):
        state = step(state, *batch(number, ranks))
    return jax.tree.leaves(state.params)


def with_nnx(tx: Any, ranks: list[int], seed: int) -> list[Any]:
    rngs = nnx.Rngs(seed)
    net = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 1, rngs=rngs))
    nnx.update(net, hvd.broadcast_parameters(nnx.state(net), root_rank=0))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any, y: Any) -> None:
        gradients = nnx.grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
        optimizer.update(net, gradients)

    for number in range(STEPS):
        step(net, optimizer, *batch(number, ranks))
    return jax.tree.leaves(nnx.state(net, nnx.Param))


@pytest.mark.parametrize("train", [pytest.param(with_linen, marks=pytest.mark.slow), with_nnx])
def test_flax(train: Any) -> None:
    result = train(hvd.distributed(optax.adam(0.05)), [RANK], seed=RANK)
    expected = train(optax.adam(0.05), ALL, seed=RANK)
    assert len(result) == len(expected) >= 4
    for actual, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(actual, other, atol=1e-6)
        assert set(hvd.allgather_object(np.asarray(actual).tobytes())) == {np.asarray(actual).tobytes()}
