"""Training with ringdance.jax.distributed on n ranks equals one process training on the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sampled import sampled_rows
from steps import counting_steps
from warned import warned

import ringdance.jax as hvd
from ringdance.errors import ArgumentError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS = 6


def data(step: int, rank: int) -> tuple[Any, Any]:
    x = jax.random.normal(jax.random.key(1000 * step + rank), (ROWS, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


def beginning(seed: int = 0) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "in": {"w": jax.random.normal(first, (8, 16)) / 3, "b": jnp.zeros(16)},
        "out": {"w": jax.random.normal(second, (16, 1)) / 4, "b": jnp.zeros(1)},
    }


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return ((hidden @ params["out"]["w"] + params["out"]["b"] - y) ** 2).mean()


def train(tx: Any, ranks: list[int], params: Any, jit: bool = True, steps: int = 20) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    run = jax.jit(step, donate_argnums=(0, 1)) if jit else step
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    for number in range(steps):
        parts = [data(number, rank) for rank in ranks]
        x, y = (jnp.concatenate(some) for some in zip(*parts, strict=True))
        params, state, _ = run(params, state, x, y)
    return params


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("jit", "differ"), sampled_rows("weights differ", [
    (True, False), (True, True), (False, True), (False, False),
], 1, always=[(True, True)]))
def test_weights_that_differ_are_noticed(jit: bool, differ: bool) -> None:
    with warned() as texts:  # compared in steps 10 and 100, and reported once
        steps = 102 if jit else 12
        train(hvd.distributed(optax.sgd(0.1)), [RANK], beginning(RANK * differ), jit, steps)
        hvd.barrier()
    assert len(texts) == (RANK == 0 and differ)
    assert all("an element of 'in/w' is" in text for text in texts)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("jit", "value", "says"), sampled_rows("leaves", [
    (jit, *case) for jit in (True, False)
    for case in ((1, ""), (np.nan, "nan on rank 1"), (-np.inf, "-inf on rank 1"))
], 2))
def test_leaves_without_gradient_may_differ(jit: bool, value: float, says: str) -> None:
    """They may differ in value and shape, as after ``equinox.partition``. Two steps before a join suffice."""
    params = {"w": jnp.full(4, value if RANK == 1 else 1.0), "own": jnp.full(3 + RANK, float(RANK))}
    gradients = {"w": jnp.zeros(4), "own": None}
    tx = hvd.distributed(optax.sgd(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params)
    with warned() as texts:
        for _ in range(6):
            for _ in range(2):
                jax.block_until_ready(update(gradients, state, params))
            hvd.join()
    assert len(texts) == (RANK == 0 and says != "")
    assert all("'w' is 1 on rank 0 (" in text and says in text for text in texts)


@pytest.mark.ranks(2)
def test_weights_are_compared_wherever_update_is_traced() -> None:
    """Weights are compared in a condition and in ``grad``, also if parameters are not arrays."""
    params = beginning()
    tx = hvd.distributed(optax.sgd(0.1))
    state = tx.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    every_other = jax.jit(lambda number: jax.lax.cond(
        number % 2 == 1, lambda: tx.update(gradients, state, params)[0], lambda: gradients
    ))  # fmt: skip
    for number in range(24):
        every_other(number)
    first = {"w": jnp.ones(3)}
    plain = tx.init(first)
    through = jax.grad(lambda w: tx.update({"w": w}, plain, {"w": w})[0]["w"].sum())(jnp.ones(3))
    assert through.tolist() == pytest.approx([-0.1] * 3)
    updates, _ = tx.update({"w": 1.0}, tx.init({"w": 1.0}), {"w": 1.0})
    assert float(updates["w"]) == pytest.approx(-0.1)


def far(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def same_on_all_ranks(params: Any) -> bool:
    weights = hvd.allgather_object(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))
    return len(set(weights)) == 1


def search(tx: Any, ranks: list[int], extra: tuple[str, ...]) -> Any:
    """Train with a transformation that calls the loss function again within ``update``."""
    params, parts = beginning(), [data(0, rank) for rank in ranks]
    x, y = (jnp.concatenate(some) for some in zip(*parts, strict=True))

    def loss(params: Any) -> Any:
        return loss_of(params, x, y)

    def slope(params: Any, _: Any) -> Any:
        return jax.grad(loss)(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params)
        inputs = {"value": value, "grad": gradients, "value_fn": loss, "grad_fn": slope}
        chosen = {name: entry for name, entry in inputs.items() if name in extra}
        updates, state = tx.update(gradients, state, params, **chosen)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    return params


def alone(work: Callable[[], Any]) -> Any:
    """Run ``work`` as one process would: on rank 0, while others wait. Return its result on all ranks."""
    return hvd.broadcast_object(jax.device_get(work()) if RANK == 0 else None)


SEARCHES = [
    (lambda: optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5, store_grad=True)),
     ("value", "grad", "value_fn")),
    (lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True), ("grad_fn",)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "extra"), sampled_rows("searches", SEARCHES, 1))
def test_what_calls_the_loss_again_gets_that_of_all_ranks(make: Any, extra: tuple[str, ...]) -> None:
    """Line searches choose the same step on all ranks, from losses and gradients of the whole batch."""
    result = search(hvd.distributed(make()), [RANK], extra)
    assert same_on_all_ranks(result)
    assert far(result, alone(lambda: search(make(), list(range(SIZE)), extra))) < 1e-4


OPTIMIZERS = {
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
}


CASES = [(name, jit) for name in OPTIMIZERS for jit in (True, False)]


@pytest.mark.parametrize(("name", "jit"), sampled_rows("twenty steps", CASES, 1))
def test_twenty_steps_equal_one_process(name: str, jit: bool) -> None:
    make = OPTIMIZERS[name]
    params = hvd.broadcast_parameters(beginning(RANK), root_rank=0)
    assert far(params, beginning(0)) == 0
    with counting_steps() as steps:
        result = jax.block_until_ready(train(hvd.distributed(make()), [RANK], params, jit))
        assert steps() == 20 * (SIZE > 1)
    assert same_on_all_ranks(result)
    assert far(result, alone(lambda: train(make(), list(range(SIZE)), params))) < 1e-6


def test_accumulation() -> None:
    """Two steps' reduced gradients make one update, and the state is equal on all ranks."""
    tx = hvd.distributed(optax.MultiSteps(optax.sgd(0.05), 2))
    result = train(tx, [RANK], beginning())
    assert same_on_all_ranks(result)
    plain = optax.MultiSteps(optax.sgd(0.05), 2)
    assert far(result, train(plain, list(range(SIZE)), beginning())) < 1e-6
    _, state = tx.update(jnp.full(1, 10.0 * RANK), tx.init(jnp.zeros(1)))
    assert same_on_all_ranks(state)


def test_accumulation_passes_extra_arguments_on() -> None:
    """MultiSteps accepts extra arguments, although optax does not recognize that it does."""
    seen = []

    def update(updates: Any, state: Any, params: Any = None, *, value: Any = None, **_: Any) -> Any:
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = hvd.distributed(optax.MultiSteps(inner, 1))
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), value=jnp.float32(RANK))
    assert seen[-1] is not None


def test_options() -> None:
    total = train(hvd.distributed(optax.sgd(0.1 / SIZE), op=hvd.Sum), [RANK], beginning())
    rounded = train(hvd.distributed(optax.sgd(0.1), compression=hvd.Compression.fp16), [RANK], beginning())
    expected = train(optax.sgd(0.1), list(range(SIZE)), beginning())
    assert far(total, expected) < 1e-6
    assert far(rounded, expected) < 2e-2
    assert same_on_all_ranks(rounded)


def test_bfloat16_parameters() -> None:
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), beginning())
    expected = alone(lambda: train(optax.sgd(0.1), list(range(SIZE)), small))
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        result = train(hvd.distributed(optax.sgd(0.1), compression=compression), [RANK], small)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype(jnp.bfloat16)}
        assert same_on_all_ranks(result)
        assert far(result, expected) < 5e-2


def test_a_loss_that_the_optimizer_is_given_is_that_of_all_ranks() -> None:
    """Otherwise the ranks would take steps of different length, here the loss / |gradient|^2."""
    params, tx = jnp.ones(3), hvd.distributed(optax.polyak_sgd())
    result, _ = jax.jit(tx.update)(params, tx.init(params), params, value=jnp.float32(RANK))
    np.testing.assert_allclose(result, -(SIZE - 1) / 2 / 3, rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_a_nan_on_one_rank_skips_the_step_on_all(jit: bool) -> None:
    params, gradients = jnp.ones(3), jnp.full(3, jnp.nan if RANK == 0 else 1.0)
    tx = hvd.distributed(optax.apply_if_finite(optax.sgd(0.1), 3))
    update = jax.jit(tx.update) if jit else tx.update
    result, state = update(gradients, tx.init(params), params)
    assert not result.any()
    result, state = update(jnp.full(3, RANK + 1.0), state, params)
    np.testing.assert_allclose(result, -0.1 * (SIZE + 1) / 2, rtol=1e-6)
    for outer in ("apply_if_finite", "MultiSteps") if SIZE > 1 else ():  # the reverse nesting is refused
        tx = getattr(optax, outer)(hvd.distributed(optax.sgd(0.1)), 3)
        update = jax.jit(tx.update) if jit else tx.update
        with pytest.raises(ArgumentError, match=rf"Write hvd.distributed\(optax.{outer}"):
            update(gradients, tx.init(params), params)


@pytest.mark.ranks(3, 4)
def test_process_set() -> None:
    """Two ranks train together, and each other rank trains alone."""
    members = [0, SIZE - 1]
    some = hvd.add_process_set(members)
    try:
        tx = hvd.distributed(optax.sgd(0.1), process_set=some)
        result = jax.block_until_ready(train(tx, [RANK], beginning()))
        expected = train(optax.sgd(0.1), members if RANK in members else [RANK], beginning())
        assert far(result, expected) < 1e-6
        assert far(expected, beginning()) > 1e-2
    finally:
        hvd.remove_process_set(some)


@pytest.mark.ranks(1)
def test_alone_nothing_changes() -> None:
    result = train(hvd.distributed(optax.adam(1e-2)), [0], beginning())
    assert far(result, train(optax.adam(1e-2), [0], beginning())) == 0
