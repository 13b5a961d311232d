"""JAX beyond jit and grad: vmap, several devices in one process, and an XLA whose layout is not known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringdance.jax as hvd
from ringdance.errors import ArgumentError
from ringdance.jax import ffi

jax.config.update("jax_num_cpu_devices", 2)  # before the first array of this process
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 3
SEVERAL_DEVICES = jax.__version_info__ >= (0, 10)


def mine(rank: int = RANK) -> Any:
    """One array of 2 * SIZE rows for each of a batch."""
    return jnp.arange(BATCH * 2.0 * SIZE * 2).reshape(BATCH, 2 * SIZE, 2) * (rank + 1) + rank


def one_by_one(function: Any, values: Any) -> Any:
    return jnp.stack([function(one) for one in values])


VERBS = {
    "allreduce": partial(hvd.allreduce, op=hvd.Sum),
    "largest": partial(hvd.allreduce, op=hvd.Max),
    "allgather": hvd.allgather,
    "broadcast": partial(hvd.broadcast, root_rank=SIZE - 1),
    "alltoall": hvd.alltoall,
    "reducescatter": partial(hvd.reducescatter, op=hvd.Sum),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_vmap_gives_what_a_loop_gives(verb: str, jit: bool) -> None:
    function = VERBS[verb]
    mapped = jax.vmap(function)
    found = (jax.jit(mapped) if jit else mapped)(mine())
    assert jnp.array_equal(found, one_by_one(function, mine()))
    turned = jax.vmap(function, in_axes=2, out_axes=2)(jnp.moveaxis(mine(), 0, 2))
    assert jnp.array_equal(jnp.moveaxis(turned, 2, 0), found)
    assert jnp.array_equal(jax.vmap(jax.vmap(function))(mine()[None]), found[None])
    if verb == "largest":
        return

    def loss(x: Any) -> Any:
        return (function(x) * (RANK + 1)).sum()

    gradient = jax.vmap(jax.grad(loss))(mine())
    assert jnp.array_equal(gradient, one_by_one(jax.grad(loss), mine()))
    assert jnp.array_equal(gradient, jax.grad(lambda x: jax.vmap(loss)(x).sum())(mine()))


def test_vmap_of_scalars_and_of_a_part_of_a_group() -> None:
    total = partial(hvd.allreduce, op=hvd.Sum)
    assert jax.vmap(total)(jnp.arange(3.0)).tolist() == [0, SIZE, 2 * SIZE]
    both = jax.vmap(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum), in_axes=(0, None))
    many, one = both(jnp.ones((BATCH, 2)), jnp.full(2, RANK + 1.0))
    assert many.tolist() == [[SIZE] * 2] * BATCH
    assert one.tolist() == [[SIZE * (SIZE + 1) / 2] * 2] * BATCH
    if SIZE > 1:  # alone every reduction leaves things as they are
        with pytest.raises(ArgumentError, match="Adasum weighs whole tensors"):
            jax.vmap(partial(hvd.allreduce, op=hvd.Adasum))(mine())


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


@pytest.mark.skipif(SEVERAL_DEVICES, reason="JAX 0.10 can")
@pytest.mark.ranks(2, 3, 4)
def test_older_versions_say_that_they_cannot() -> None:
    with pytest.raises(ArgumentError, match=r"JAX 0\.10 or newer"):
        jax.jit(hvd.allreduce)(sharded(jnp.ones(8), "here"))


@pytest.mark.skipif(not SEVERAL_DEVICES, reason="needs JAX 0.10")
def test_training_on_two_devices_of_each_rank() -> None:
    """Data-parallel on the devices here, by XLA, and over the ranks: as one process on all rows."""
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

    found = train(hvd.distributed(optax.adam(0.1)), sharded(rows[RANK], "here"), sharded(jnp.zeros(3)))
    expected = train(optax.adam(0.1), rows.reshape(-1, 3), jnp.zeros(3))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len({np.asarray(found).tobytes(), *hvd.allgather_object(np.asarray(found).tobytes())}) == 1


@pytest.mark.ranks(2, 3, 4)
def test_within_shard_map_there_is_an_error() -> None:
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has it elsewhere")
    mesh = Mesh(np.array(jax.local_devices()), ("here",))
    spec = PartitionSpec("here")
    inside = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ArgumentError, match="shard_map or pmap"):
        jax.jit(inside)(sharded(jnp.ones(4), "here"))


@pytest.fixture(params=["another member", "another version", "no header"])
def unknown(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """XLA's header as a later version might have it."""
    there = Path("xla", "ffi", "api", "c_api.h")
    text = Path(jax.ffi.include_dir(), there).read_text()
    if request.param == "another member":
        changed = text.replace("  XLA_FFI_DataType dtype;", "  int64_t layout;\n  XLA_FFI_DataType dtype;")
    else:
        changed = text.replace("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 1")
    assert changed != text
    if request.param != "no header":
        (tmp_path / there).parent.mkdir(parents=True)
        (tmp_path / there).write_text(changed)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    for known in (ffi._version, ffi.available):
        known.cache_clear()
    yield
    monkeypatch.undo()
    for known in (ffi._version, ffi.available):
        known.cache_clear()


@pytest.mark.usefixtures("unknown")
def test_an_unknown_layout_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs call Python with arrays then, and give the same."""
    assert not ffi.available()

    def never(*_: Any) -> None:
        raise AssertionError("XLA's memory was touched")

    monkeypatch.setattr(ffi, "_execute", never)
    x = jnp.arange(6.0) * (RANK + 1)
    found = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(x)
    np.testing.assert_array_equal(found, np.arange(6.0) * sum(range(SIZE + 1)))
    found = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()))(x)
    np.testing.assert_array_equal(found, 2 * SIZE * np.arange(6.0) * sum(range(SIZE + 1)))
