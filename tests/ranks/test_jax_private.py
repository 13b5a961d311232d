"""How the JAX binding behaves if a private name of JAX is missing: see ringdance.jax._private."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import effects
from jax._src.interpreters import pxla

import ringdance.jax as hvd
from ringdance.jax import _private, exchange, ffi, programs

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
total = partial(hvd.allreduce, op=hvd.Sum)


def jit(function: Callable[..., Any]) -> Any:
    """Compile again, whatever was compiled before."""
    return jax.jit(lambda *values: function(*values))


def no_address(*_: Any) -> None:
    raise AssertionError("XLA's memory was accessed")


def test_without_ordered_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs exchange through io_callback: in order, differentiably, and in control flow."""
    with monkeypatch.context() as patch:
        patch.delattr(effects, "remat_allowed_effects")
        assert _private._declare_effect() is None
    monkeypatch.setattr(exchange, "EFFECT", None)
    monkeypatch.setattr(ffi, "_execute", no_address)
    x = jnp.arange(4.0) + RANK

    def twice(x: Any) -> Any:
        total(x)  # the result is not used
        return jax.lax.fori_loop(0, 2, lambda _, x: total(x) / SIZE, x)

    expected = jnp.arange(4.0) + (SIZE - 1) / 2
    assert jnp.allclose(jit(twice)(x), expected)
    assert jit(jax.grad(lambda x: total(x).sum()))(x).tolist() == [SIZE] * 4
    gathered = jit(hvd.allgather)(jnp.full(2, RANK * 1.0))
    assert gathered.tolist() == [rank for rank in range(SIZE) for _ in range(2)]
    jax.effects_barrier()


def test_without_the_type_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs call Python with arrays."""
    monkeypatch.setattr(_private, "abstract_token", None)
    monkeypatch.setattr(ffi, "_execute", no_address)
    assert not programs.by_address()
    assert jit(total)(jnp.ones(3)).tolist() == [SIZE] * 3


@pytest.mark.parametrize("unknown", ["no such name", "it does something else"])
def test_without_the_lowering_of_programs(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start in JAX's own way."""
    monkeypatch.setattr(programs.atexit, "register", lambda _: None)
    if unknown == "no such name":
        monkeypatch.delattr(pxla, "_cached_lowering_to_hlo")
        programs.start_quickly()
        assert not hasattr(pxla, "_cached_lowering_to_hlo")
        return
    original = pxla._cached_lowering_to_hlo

    def other(jaxpr: Any, *rest: Any, **named: Any) -> Any:
        assert not any(eqn.primitive is programs._program for eqn in jaxpr.eqns), "never lowered"
        return original(jaxpr, *rest, **named)

    monkeypatch.setattr(pxla, "_cached_lowering_to_hlo", other)
    programs.start_quickly()
    program = jit(total)
    assert [float(program(number * 1.0)) for number in range(3)] == [0, SIZE, 2 * SIZE]


@pytest.mark.parametrize(
    ("module", "name", "attribute", "without"),
    [
        ("core", "abstract_token", "abstract_token", None),
        ("callback", "_callback_op_sharding", "one_device_of", None),
        ("sharding_impls", "SPMDAxisContext", "SPMDAxisContext", ()),
        ("effects", "ordered_effects", "EFFECT", None),
        ("core", "trace_state_clean", "no_trace", bool),
        ("dispatch", "runtime_tokens", "drop_tokens", int),
    ],
)
def test_names_are_looked_up(
    module: str, name: str, attribute: str, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(_private, attribute) is not without
    monkeypatch.delattr(importlib.import_module(f"jax._src.{module}"), name)
    spec = importlib.util.find_spec("ringdance.jax._private")
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert getattr(again, attribute) == without
