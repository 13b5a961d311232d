"""Exchanges of JAX arrays with NCCL. A stand-in exchanges host memory instead: see ``nccl_double``."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringdance.jax as hvd
from ringdance.core.exchange import nccl
from ringdance.errors import ArgumentError, CollectiveError, MismatchError
from ringdance.jax import device, ffi, programs

if os.environ.get("TEST_NCCL") != "double":
    pytest.skip("runs in the jobs jax-nccl", allow_module_level=True)

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
double: Any = nccl.nccl
several = pytest.mark.skipif(SIZE == 1, reason="one rank exchanges nothing")
total = partial(hvd.allreduce, op=hvd.Sum)


@pytest.fixture(autouse=True)
def _forget() -> None:
    double.enqueued.clear()


@several
def test_a_group_is_one_call_for_each_dtype() -> None:
    def function(x: Any) -> Any:
        values = [x, x.astype(jnp.bfloat16), x.reshape(2, 3) + 1, x.astype(jnp.int32)]
        return hvd.grouped_allreduce(values, op=hvd.Sum)

    x = jnp.arange(6.0) * (RANK + 1)
    factor = sum(range(SIZE + 1))
    for _ in range(3):
        a, b, c, d = jax.jit(function)(x)
    np.testing.assert_array_equal(a, np.arange(6.0) * factor)
    np.testing.assert_array_equal(b.astype(jnp.float32), np.arange(6.0) * factor)
    np.testing.assert_array_equal(c, np.arange(6.0).reshape(2, 3) * factor + SIZE)
    np.testing.assert_array_equal(d, np.arange(6) * factor)
    assert double.enqueued == ["all_reduce"] * 9


@several
def test_each_collective_goes_to_nccl() -> None:
    x = jnp.arange(2.0 * SIZE) + 10 * RANK
    rows = np.arange(2.0 * SIZE)
    gathered = jax.jit(lambda x: hvd.grouped_allgather([x.reshape(-1, 2), x]))(x)
    expected = np.concatenate([rows + 10 * rank for rank in range(SIZE)])
    np.testing.assert_array_equal(gathered[0], expected.reshape(-1, 2))
    np.testing.assert_array_equal(gathered[1], expected)
    scattered = jax.jit(lambda x: hvd.grouped_reducescatter([x, x.reshape(-1, 1) + 1], op=hvd.Sum))(x)
    own = (rows * SIZE + 10 * sum(range(SIZE)))[2 * RANK : 2 * RANK + 2]
    np.testing.assert_array_equal(scattered[0], own)
    np.testing.assert_array_equal(scattered[1], own[:, None] + SIZE)
    sent = jax.jit(hvd.alltoall)(x)
    own = rows[2 * RANK : 2 * RANK + 2]
    np.testing.assert_array_equal(sent, np.concatenate([own + 10 * rank for rank in range(SIZE)]))
    np.testing.assert_array_equal(jax.jit(lambda x: hvd.broadcast(x > 0, SIZE - 1))(x - 10 * RANK), rows > 0)
    kinds = ["all_gather", "reduce_scatter", *["send", "receive"] * SIZE, "broadcast"]
    assert double.enqueued == kinds


@several
def test_scaling_and_averages() -> None:
    x = jnp.full(4, RANK + 1.0)
    call = partial(hvd.allreduce, op=hvd.Average, prescale_factor=4.0, postscale_factor=0.5)
    for convert in (jnp.float32, jnp.float16, jnp.bfloat16):
        result = jax.jit(call)(x.astype(convert))
        assert result.dtype == convert
        np.testing.assert_allclose(result.astype(jnp.float32), 2 * np.mean(np.arange(SIZE) + 1.0), rtol=0.01)
    assert double.enqueued == ["all_reduce"] * 3


@several
@pytest.mark.parametrize("call", [
    partial(hvd.allreduce, op=hvd.Max), partial(hvd.allreduce, op=hvd.Average),
    lambda x: hvd.allreduce(x * 1j, op=hvd.Sum).imag, lambda x: hvd.reducescatter(x[:-1], op=hvd.Sum),
    lambda x: hvd.allgather(x[:0]),
])  # fmt: skip
def test_what_nccl_cannot_do_goes_through_the_host(call: Any) -> None:
    x = jnp.arange(2 * SIZE)
    jax.block_until_ready(jax.jit(call)(x))
    assert double.enqueued == []


@several
def test_eager_calls_stay_on_the_device() -> None:
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(total(x), SIZE * np.arange(4.0))
    np.testing.assert_array_equal(hvd.broadcast(x + RANK, 1), np.arange(4.0) + 1)
    assert double.enqueued == ["all_reduce", "broadcast"]
    np.testing.assert_array_equal(hvd.allgather(x[: RANK + 1]).shape, (SIZE * (SIZE + 1) // 2,))
    assert double.enqueued == ["all_reduce", "broadcast"]  # its length is not known in advance


@several
def test_exchanges_of_a_program_follow_each_other() -> None:
    """So the same name may be used twice, and after an error, no other exchange is in flight."""

    def function(x: Any, y: Any) -> Any:
        return total(x, name="twice"), total(y, name="twice")

    first, second = jax.jit(function)(jnp.ones(3), jnp.arange(4.0))
    np.testing.assert_array_equal(first, np.full(3, SIZE))
    np.testing.assert_array_equal(second, SIZE * np.arange(4.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatched shapes"):
        jax.block_until_ready(jax.jit(function)(jnp.ones(3 + RANK), jnp.ones(4)))
    assert not device._started
    programs.settle()


@several
def test_the_order_of_dtypes_must_match() -> None:
    values = [jnp.ones(3), jnp.ones(3, jnp.int32), jnp.ones(3)]
    swapped = values if RANK else [values[0], values[2], values[1]]
    with pytest.raises(MismatchError, match="Mismatched"):
        hvd.grouped_allreduce(swapped, op=hvd.Sum)


@several
def test_eager_calls_with_many_names_compile_once() -> None:
    for number in range(5):
        total(jnp.ones(7), name=f"many.{number}")
    before = device._compiled.cache_info().misses
    for number in range(5, 10):
        total(jnp.ones(7), name=f"many.{number}")
    assert device._compiled.cache_info().misses == before


@several
def test_a_rank_uses_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    total(jnp.ones(2))
    hvd.barrier()
    if RANK == 0:
        monkeypatch.setattr(double, "device_of", lambda _: 7)
    with pytest.raises((ArgumentError, CollectiveError), match=r"on GPU 0, and cannot use GPU 7"):
        total(jnp.ones(2), name="another")
    monkeypatch.undo()
    np.testing.assert_array_equal(total(jnp.ones(2), name="another"), [SIZE, SIZE])


@several
def test_rows_must_match_within_a_program() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatched shapes"):
        jax.block_until_ready(jax.jit(hvd.allgather)(jnp.arange(2.0 + RANK)))
    with pytest.raises(MismatchError, match="Mismatched shapes"):
        total(jnp.arange(2.0 + RANK))
    np.testing.assert_array_equal(total(jnp.ones(2)), [SIZE, SIZE])


def test_the_stream_is_found_in_the_table_of_xla() -> None:
    """On the CPU, XLA has no stream and says so."""
    errors = []

    def handler(_: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        try:
            double.original_stream(*stream.args)
        except RuntimeError as error:
            errors.append(str(error))

    ffi.register("test_stream", handler, "cpu")
    kind = jax.ShapeDtypeStruct((2,), jnp.float32)
    jax.block_until_ready(jax.jit(jax.ffi.ffi_call("test_stream", kind))(jnp.ones(2)))
    assert errors == ["XLA did not return the stream of the program."]


@several
def test_a_rank_that_has_joined_sends_zeros() -> None:
    def function(x: Any) -> Any:
        return hvd.grouped_allreduce([x, jnp.full(100_000, 2.0, jnp.bfloat16)], op=hvd.Sum)

    step = jax.jit(function)
    for number in range(3 * RANK + 2):
        a, b = step(jnp.ones(3))
        ranks = SIZE if number < 2 else SIZE - 1 - (number - 2) // 3
        np.testing.assert_array_equal(a, np.full(3, ranks))
        np.testing.assert_array_equal(b.astype(jnp.float32), np.full(100_000, 2 * ranks))
    assert hvd.join() == SIZE - 1


@several
def test_sets_and_a_restarted_job() -> None:
    for _ in range(2):
        if SIZE > 2:
            ends = hvd.add_process_set([0, SIZE - 1])
            if ends.included():
                result = jax.jit(partial(total, process_set=ends))(jnp.full(2, RANK + 1.0))
                np.testing.assert_array_equal(result, np.full(2, SIZE + 1.0))
        alone = hvd.add_process_set([0])
        if RANK == 0:
            np.testing.assert_array_equal(total(jnp.ones(2), process_set=alone), np.ones(2))
        hvd.shutdown()
        hvd.init()
    np.testing.assert_array_equal(total(jnp.ones(2)), np.full(2, SIZE))


@several
def test_a_program_for_cuda_packs_starts_finishes_and_unpacks() -> None:
    """JAX can lower for a GPU without one."""
    call = jax.jit(lambda x, y: hvd.grouped_allreduce([x, y], op=hvd.Average, prescale_factor=2.0))
    text = call.trace(jnp.ones(4), jnp.ones((2, 3))).lower(lowering_platforms=("cuda",)).as_text()
    parts = ("stablehlo.multiply", "concatenate", "@ringdance_start", "@ringdance_finish", "slice")
    order = [text.index(part) for part in parts]
    assert order == sorted(order)
    assert "tensor<10xf32>" in text
    assert "callback" not in text


def test_the_version_of_nccl_is_known() -> None:
    assert hvd.nccl_built() == double.version


@several
def test_ranks_that_share_a_gpu_get_an_error_and_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.shutdown()
    hvd.init()
    monkeypatch.setattr(double, "use", lambda _: "one GPU")
    with pytest.raises(ArgumentError, match=r"share a GPU.*jax_cuda_visible_devices"):
        total(jnp.ones(2), name="shared")
    monkeypatch.undo()
    np.testing.assert_array_equal(total(jnp.ones(2), name="shared"), [SIZE, SIZE])
