"""JAX with several devices in one process. All tests here need them, so they form their own job."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringdance.jax as hvd
from ringdance.errors import ArgumentError
from ringdance.jax import _private

jax.config.update("jax_num_cpu_devices", 2)  # must precede the first array of this process
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
SEVERAL_DEVICES = jax.__version_info__ >= (0, 10)


def sharded(value: Any, *axes: Any) -> Any:
    mesh = Mesh(np.array(jax.local_devices()), ("here",))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))


@pytest.mark.skipif(not SEVERAL_DEVICES, reason="needs JAX 0.10")
def test_a_program_for_two_devices_exchanges_once() -> None:
    assert len(jax.local_devices()) == 2
    x = jnp.arange(8.0) * (RANK + 1)
    expected = np.arange(8.0) * sum(range(SIZE + 1))
    total = partial(hvd.allreduce, op=hvd.Sum)
    for value in (sharded(x, "here"), sharded(x), jax.device_put(x, jax.local_devices()[1])):
        np.testing.assert_array_equal(jax.jit(total)(value), expected)
        np.testing.assert_array_equal(total(value), expected)
        assert total(value).sharding == value.sharding
    gradient = jax.jit(jax.grad(lambda x: (total(x) ** 2).sum()))(sharded(x, "here"))
    np.testing.assert_array_equal(gradient, 2 * SIZE * expected)


@pytest.mark.skipif(not SEVERAL_DEVICES, reason="needs JAX 0.10")
def test_broadcast_values_go_into_programs_for_two_devices() -> None:
    """Values keep whether they are committed to a device: JAX refuses programs with a mixture of devices."""
    params = {"a": sharded(jnp.full(4, RANK + 1.0), "here"), "b": jnp.full(4, RANK + 2.0)}
    params = hvd.broadcast_parameters(params)
    assert params["a"].committed
    assert not params["b"].committed
    np.testing.assert_array_equal(jax.jit(lambda both: both["a"] + both["b"])(params), [3.0] * 4)


@pytest.mark.skipif(not SEVERAL_DEVICES, reason="needs JAX 0.10")
@pytest.mark.ranks(2, 3)
def test_after_a_failure_programs_exchange_again() -> None:
    """JAX passes a failure on. A call outside programs raises it once more, and a new job discards it."""
    total = jax.jit(partial(hvd.allreduce, op=hvd.Sum))
    for again in (False, True):
        with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
            jax.block_until_ready(total(sharded(jnp.ones(2 + RANK))))
        if again:
            hvd.shutdown()
            hvd.init()
        else:
            with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
                hvd.barrier()
        assert total(sharded(jnp.ones(2))).tolist() == [SIZE] * 2
        assert hvd.allreduce(sharded(jnp.ones(2))).tolist() == [1.0] * 2


def test_rows_that_cannot_be_divided_among_the_devices() -> None:
    """Eagerly, where shapes may change, an odd number of rows is accepted for two devices."""
    rows = sharded(jnp.arange(4.0 * SIZE - 2), "here")
    part = hvd.reducescatter(rows, op=hvd.Sum)
    assert part.tolist() == [SIZE * array for array in np.array_split(np.arange(4.0 * SIZE - 2), SIZE)[RANK]]
    result, received = hvd.alltoall(rows, splits=[1] * SIZE)
    assert (result.tolist(), received.tolist()) == ([RANK] * SIZE, [1] * SIZE)
    assert hvd.allgather(rows).sharding == rows.sharding


@pytest.mark.skipif(SEVERAL_DEVICES, reason="JAX 0.10 supports it")
def test_older_versions_say_that_they_cannot() -> None:
    with pytest.raises(ArgumentError, match=r"JAX 0\.10 or newer"):
        jax.jit(hvd.allreduce)(sharded(jnp.ones(8), "here"))


@pytest.mark.skipif(not SEVERAL_DEVICES, reason="needs JAX 0.10")
def test_training_on_two_devices_of_each_rank() -> None:
    """Data-parallel training over local devices (by XLA) and ranks equals one process on all rows."""
    rows = jax.random.normal(jax.random.key(0), (SIZE, 4, 3))

    def train(tx: Any, x: Any, w: Any) -> Any:
        @jax.jit
        def step(w: Any, state: Any) -> Any:
            gradient = jax.grad(lambda w: ((x @ w - 1.0) ** 2).mean())(w)
            updates, state = tx.update(gradient, state, w)
            return optax.apply_updates(w, updates), state

        state = tx.init(w)
        for _ in range(5):
            w, state = step(w, state)
        return w

    result = train(hvd.distributed(optax.adam(0.1)), sharded(rows[RANK], "here"), sharded(jnp.zeros(3)))
    expected = train(optax.adam(0.1), rows.reshape(-1, 3), jnp.zeros(3))
    np.testing.assert_allclose(result, expected, atol=1e-6)
    assert len({np.asarray(result).tobytes(), *hvd.allgather_object(np.asarray(result).tobytes())}) == 1


def test_without_the_private_name_that_places_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_private, "one_device_of", None)
    with pytest.raises(ArgumentError, match="keep the arrays on one device"):
        jax.jit(lambda x: hvd.allreduce(x) * 1)(sharded(np.ones((4, 2))))


def test_within_shard_map_there_is_an_error() -> None:
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has shard_map elsewhere")
    mesh = Mesh(np.array(jax.local_devices()), ("here",))
    spec = PartitionSpec("here")
    inside = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ArgumentError, match="shard_map or pmap"):
        jax.jit(inside)(sharded(jnp.ones(4), "here"))


def test_programs_on_different_devices_keep_their_order() -> None:
    """Each device runs independently, so only the token that JAX passes on keeps two programs in order."""
    total = jax.jit(partial(hvd.allreduce, op=hvd.Sum))
    # Without a matrix product, because some crash XLA in JAX 0.9.2.
    work = lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.sin(y), jnp.full(90_000, 1e-9) * x)  # noqa: E731
    late = jax.jit(lambda x: total(x + work(x).sum() * 0))
    here, there = jax.local_devices()
    numbers = [jnp.float32(number) for number in range(10)]
    pairs = [(jax.device_put(number, here), jax.device_put(number + 100, there)) for number in numbers]
    for first, second in jax.block_until_ready(pairs):  # compiles the programs and checks their results
        assert (float(late(first)), float(total(second))) == (SIZE * float(first), SIZE * float(second))
    results = [(late(first), total(second)) for first, second in pairs]
    for (first, second), (actual, other) in zip(pairs, results, strict=True):
        assert (float(actual), float(other)) == (SIZE * float(first), SIZE * float(second))
