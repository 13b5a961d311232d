"""Training with ringdance.jax.distributed on n ranks equals one process on the joined batch."""

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
    with warned() as texts:  # compared in the steps 10 and 100, and said once
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
    """In value and shape, as ``equinox.partition`` leaves them; and few steps before each join are enough."""
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
    """In the condition of several passes, in ``grad`` and ``vmap``, with parameters that are no arrays."""
    params = beginning()
    tx = hvd.distributed(optax.sgd(0.1), backward_passes_per_step=2)
    state = tx.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    for _ in range(24):
        _, state = tx.update(gradients, state, params)
    tx = hvd.distributed(optax.sgd(0.1))
    state = tx.init(params)
    one = {"w": jnp.ones(3)}
    plain = tx.init(one)
    through = jax.grad(lambda w: tx.update({"w": w}, plain, {"w": w})[0]["w"].sum())(jnp.ones(3))
    assert through.tolist() == pytest.approx([-0.1] * 3)
    many = jax.vmap(lambda w: tx.update({"w": w}, plain, {"w": w})[0]["w"])(jnp.ones((2, 3)))
    assert many.shape == (2, 3)
    updates, _ = tx.update({"w": 1.0}, tx.init({"w": 1.0}), {"w": 1.0})
    assert float(updates["w"]) == pytest.approx(-0.1)


def far(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def same_on_all_ranks(params: Any) -> bool:
    weights = hvd.allgather_object(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))
    return len(set(weights)) == 1


def search(tx: Any, ranks: list[int], extra: tuple[str, ...]) -> Any:
    """Train with what calls the loss function again within ``update``."""
    params, parts = beginning(), [data(0, rank) for rank in ranks]
    x, y = (jnp.concatenate(some) for some in zip(*parts, strict=True))

    def loss(params: Any) -> Any:
        return loss_of(params, x, y)

    def slope(params: Any, _: Any) -> Any:
        return jax.grad(loss)(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params)
        given = {"value": value, "grad": gradients, "value_fn": loss, "grad_fn": slope}
        chosen = {name: one for name, one in given.items() if name in extra}
        updates, state = tx.update(gradients, state, params, **chosen)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    return params


def alone(work: Callable[[], Any]) -> Any:
    """Return what ``work`` gives on rank 0; the others wait. For what one process would do."""
    return hvd.broadcast_object(jax.device_get(work()) if RANK == 0 else None)


SEARCHES = [
    (lambda: optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5, store_grad=True)),
     ("value", "grad", "value_fn")),
    (lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True), ("grad_fn",)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "extra"), sampled_rows("searches", SEARCHES, 1))
def test_what_calls_the_loss_again_gets_that_of_all_ranks(make: Any, extra: tuple[str, ...]) -> None:
    """Line searches choose one step on all ranks: by the losses and gradients of the whole batch."""
    found = search(hvd.distributed(make()), [RANK], extra)
    assert same_on_all_ranks(found)
    assert far(found, alone(lambda: search(make(), list(range(SIZE)), extra))) < 1e-4


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
        found = jax.block_until_ready(train(hvd.distributed(make()), [RANK], params, jit))
        assert steps() == 20 * (SIZE > 1)
    assert same_on_all_ranks(found)
    assert far(found, alone(lambda: train(make(), list(range(SIZE)), params))) < 1e-6


@pytest.mark.parametrize("average", [False, True])
def test_accumulation(average: bool) -> None:
    """Gradients of two steps are summed, or averaged, before one exchange."""
    tx = hvd.distributed(optax.sgd(0.05), backward_passes_per_step=2, average_aggregated_gradients=average)
    with counting_steps() as steps:
        found = jax.block_until_ready(train(tx, [RANK], beginning()))
        assert steps() == 10 * (SIZE > 1)
    assert same_on_all_ranks(found)
    plain = optax.MultiSteps(optax.sgd(0.05 * (1 if average else 2)), 2)
    assert far(found, train(plain, list(range(SIZE)), beginning())) < 1e-6


def halfway(tx: Any, params: Any) -> tuple[Any, Any]:
    """Return a step, and the state after the first of two passes, with gradients of each rank's own."""

    @jax.jit
    def step(state: Any, number: int) -> Any:
        updates, state = tx.update({"w": jnp.full(1, 10.0 * RANK + number)}, state, params)
        return state, updates["w"][0]

    return step, step(tx.init(params), 1)[0]


@pytest.mark.ranks(2, 3, 4)
def test_sums_between_passes_are_shared_or_refused() -> None:
    """The step is that of all ranks' gradients in both passes: of the means 5 n + 1 and 5 n + 2."""
    params = {"w": jnp.zeros(1)}
    mean = 10 * (SIZE - 1) / 2
    tx = hvd.distributed(optax.sgd(1.0), backward_passes_per_step=2)
    step, state = halfway(tx, params)
    shared = hvd.broadcast_parameters({"of": (params, state)}, root_rank=SIZE - 1)["of"][1]
    assert same_on_all_ranks(shared)  # so that it can be saved
    loaded = hvd.broadcast_parameters(shared if RANK == 0 else tx.init(params), root_rank=0)
    for found in (shared, loaded, hvd.broadcast_parameters(shared)):
        assert float(step(found, 2)[1]) == pytest.approx(-(2 * mean + 3))
    of_rank_zero = hvd.broadcast_object(state)
    for wrong in (of_rank_zero, state if RANK == 0 else tx.init(params)):
        with pytest.raises(ArgumentError, match="after 1 passes of a step, with sums of rank 0's"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    after, _ = step(state, 2)
    assert same_on_all_ranks(after)
    assert same_on_all_ranks(hvd.broadcast_parameters(after if RANK == 0 else tx.init(params)))
    several = jax.vmap(optax.MultiSteps(optax.sgd(1.0), 2).init)(jnp.full((3, 2), float(RANK)))
    assert same_on_all_ranks(hvd.broadcast_parameters(several))
    step, state = halfway(optax.MultiSteps(hvd.distributed(optax.sgd(1.0)), 2), params)
    assert float(step(hvd.broadcast_parameters(state), 2)[1]) == pytest.approx(-(mean + 1.5))


def test_options() -> None:
    total = train(hvd.distributed(optax.sgd(0.1 / SIZE), op=hvd.Sum), [RANK], beginning())
    divided = train(hvd.distributed(optax.sgd(0.1), gradient_predivide_factor=2.0), [RANK], beginning())
    rounded = train(hvd.distributed(optax.sgd(0.1), compression=hvd.Compression.fp16), [RANK], beginning())
    expected = train(optax.sgd(0.1), list(range(SIZE)), beginning())
    assert far(total, expected) < 1e-6
    assert far(divided, expected) < 1e-6
    assert far(rounded, expected) < 2e-2
    assert same_on_all_ranks(rounded)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.distributed(optax.sgd(0.1), backward_passes_per_step=0)


def test_bfloat16_parameters() -> None:
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), beginning())
    expected = alone(lambda: train(optax.sgd(0.1), list(range(SIZE)), small))
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        found = train(hvd.distributed(optax.sgd(0.1), compression=compression), [RANK], small)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
        assert same_on_all_ranks(found)
        assert far(found, expected) < 5e-2


@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_that_the_optimizer_is_given_is_that_of_all_ranks(passes: int) -> None:
    """Else the ranks would take steps of different length: here that is the loss / |gradient|^2."""
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    params, tx = jnp.ones(3), hvd.distributed(optax.polyak_sgd(), **options)
    state = tx.init(params)
    for _ in range(passes):
        found, state = jax.jit(tx.update)(params, state, params, value=jnp.float32(RANK))
    np.testing.assert_allclose(found, -(SIZE - 1) / 2 / 3, rtol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_a_nan_on_one_rank_skips_the_step_on_all(jit: bool) -> None:
    params, gradients = jnp.ones(3), jnp.full(3, jnp.nan if RANK == 0 else 1.0)
    tx = hvd.distributed(optax.apply_if_finite(optax.sgd(0.1), 3))
    update = jax.jit(tx.update) if jit else tx.update
    found, state = update(gradients, tx.init(params), params)
    assert not found.any()
    found, state = update(jnp.full(3, RANK + 1.0), state, params)
    np.testing.assert_allclose(found, -0.1 * (SIZE + 1) / 2, rtol=1e-6)
    if SIZE > 1:  # the other way round the rank would leave out the exchange
        tx = optax.apply_if_finite(hvd.distributed(optax.sgd(0.1)), 3)
        update = jax.jit(tx.update) if jit else tx.update
        with pytest.raises(ArgumentError, match=r"Write hvd.distributed\(optax.apply_if_finite"):
            update(gradients, tx.init(params), params)


@pytest.mark.parametrize(("kind", "of_gradients"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_accumulation_of_other_types_than_the_parameters(kind: str, of_gradients: str) -> None:
    """As the optimizer gives for the reduced sum of the passes, types included."""
    params = jnp.ones(3, kind)
    plain, tx = optax.adam(0.1), hvd.distributed(optax.adam(0.1), backward_passes_per_step=2)
    small = 1 + 1 / 128  # the last bit of bfloat16: a sum of two is exact in float32 only
    found, state = jax.jit(tx.update)(jnp.full(3, small + RANK, of_gradients), tx.init(params), params)
    assert not found.any()
    assert state.gradients.tolist() == np.float32(jnp.full(3, small + RANK, of_gradients)).tolist()
    found, state = jax.jit(tx.update)(jnp.full(3, 2.0, of_gradients), state, params)
    total = jnp.full(3, 2 + small + (SIZE - 1) / 2, of_gradients)
    expected, after = jax.jit(plain.update)(total, plain.init(params), params)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-2)
    both = (found, state.inner), (expected, after)
    assert len({tuple(leaf.dtype for leaf in jax.tree.leaves(one)) for one in both}) == 1


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("passes", [1, 2])
def test_process_set(passes: int) -> None:
    """Two ranks train together, each of the others alone."""
    members = [0, SIZE - 1]
    some = hvd.add_process_set(members)
    try:
        tx = hvd.distributed(
            optax.sgd(0.1), process_set=some, backward_passes_per_step=passes,
            average_aggregated_gradients=True,
        )
        found = jax.block_until_ready(train(tx, [RANK], beginning()))
        plain = optax.MultiSteps(optax.sgd(0.1), passes)
        expected = train(plain, members if RANK in members else [RANK], beginning())
        assert far(found, expected) < 1e-6
        assert far(expected, beginning()) > 1e-2
    finally:
        hvd.remove_process_set(some)


@pytest.mark.ranks(1)
def test_alone_nothing_changes() -> None:
    found = train(hvd.distributed(optax.adam(1e-2)), [0], beginning())
    assert far(found, train(optax.adam(1e-2), [0], beginning())) == 0
