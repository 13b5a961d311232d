"""JAX beyond jit and grad: vmap is refused, and an XLA with an unknown layout is not accessed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringdance.jax as hvd
from ringdance.jax import ffi

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


@pytest.mark.ranks(2, 3, 4)
def test_vmap_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Batching rule"):
        jax.vmap(hvd.allreduce)(jnp.ones((3, 2)))


@pytest.fixture(params=["another member", "another version", "no header"])
def unknown(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Set XLA's header to what a later version might have."""
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
    for known in (ffi._header, ffi._version):
        known.cache_clear()
    yield
    monkeypatch.undo()
    for known in (ffi._header, ffi._version):
        known.cache_clear()


@pytest.mark.usefixtures("unknown")
def test_an_unknown_layout_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then call Python with arrays and give the same results."""
    assert not ffi.available()

    def never(*_: Any) -> None:
        raise AssertionError("XLA's memory was touched")

    monkeypatch.setattr(ffi, "_execute", never)
    x = jnp.arange(6.0) * (RANK + 1)
    result = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(x)
    np.testing.assert_array_equal(result, np.arange(6.0) * sum(range(SIZE + 1)))
    result = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()))(x)
    np.testing.assert_array_equal(result, 2 * SIZE * np.arange(6.0) * sum(range(SIZE + 1)))
