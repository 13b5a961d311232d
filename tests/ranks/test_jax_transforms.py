"""JAX beyond jit and grad: vmap, and an XLA whose layout is not known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringdance.jax as hvd
from ringdance.errors import ArgumentError
from ringdance.jax import ffi

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 3


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
@pytest.mark.parametrize("kind", VERBS)
def test_vmap_gives_what_a_loop_gives(kind: str, jit: bool) -> None:
    function = VERBS[kind]
    mapped = jax.vmap(function)
    found = (jax.jit(mapped) if jit else mapped)(mine())
    assert jnp.array_equal(found, one_by_one(function, mine()))
    turned = jax.vmap(function, in_axes=2, out_axes=2)(jnp.moveaxis(mine(), 0, 2))
    assert jnp.array_equal(jnp.moveaxis(turned, 2, 0), found)
    assert jnp.array_equal(jax.vmap(jax.vmap(function))(mine()[None]), found[None])
    if kind == "largest":
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
