"""Convert torch tensors to NumPy views and back, without copying where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from ringdance.errors import ArgumentError
from ringdance.torch._private import divided_by
from ringdance.training.collectives import array_at
from ringdance.training.gradients.compression import compression_for
from ringdance.training.gradients.weights import rows_of, step_of

Array = np.ndarray[Any, Any]

Compression = compression_for(
    __name__, torch.float16, torch.bfloat16,
    lambda tensor: tensor.dtype if tensor.dtype.is_floating_point else None,
    lambda tensor, dtype: tensor.to(dtype),
)

_PLAIN = frozenset({
    torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a contiguous, detached CPU tensor. Copies only if needed.

    Non-contiguous tensors are copied (Horovod rejects them). GPU tensors are copied to pinned memory.

    Raises:
        ArgumentError: The argument is not a dense tensor, or the tensor has no data.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"Expected a torch.Tensor, but got {type(tensor).__name__}.")
    if tensor.is_meta:
        raise ArgumentError(
            f"A meta tensor (shape {tuple(tensor.shape)}) has no data. Create it on a device first, for "
            "example with module.to_empty(device='cpu')."
        )
    if divided_by(tensor) is not None and hasattr(tensor, "to_local"):
        raise ArgumentError(
            "A DTensor is sharded across processes by torch.distributed. Pass tensor.to_local() for this "
            "process's shard, or tensor.full_tensor() for the complete tensor."
        )
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"Tensors with layout {tensor.layout} ({tensor.type()}) cannot be exchanged. Use "
            "sparse_allreduce_async to reduce sparse tensors, or convert them with to_dense()."
        )
    if not tensor.is_cpu:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return staged.copy_(tensor.detach())
    return block_of(tensor)


def block_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a contiguous, detached tensor. Copies only if needed."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    return plain.contiguous().resolve_conj().resolve_neg()


def view_of(tensor: torch.Tensor) -> Array:
    """Return a NumPy view of a contiguous, detached CPU tensor. Bfloat16 views use ml_dtypes.

    Raises:
        ArgumentError: NumPy has no equivalent of the tensor's dtype.
    """
    try:
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(_BFLOAT16)
        return tensor.numpy()
    except (TypeError, RuntimeError):
        raise ArgumentError(
            f"Tensors of type {tensor.type()} ({tensor.dtype}) cannot be exchanged, because NumPy has no "
            "such type. To reduce them, convert them first, for example with tensor.to(torch.bfloat16) or "
            "tensor.to(torch.complex64). To move 8-bit tensors unchanged, pass tensor.view(torch.uint8)."
        ) from None


def array_of(tensor: torch.Tensor, in_place: bool = False) -> Array:
    """Return ``view_of(host_tensor(tensor))``, with a fast path for common tensors.

    Raises:
        ArgumentError: The argument is not a dense tensor, its dtype cannot be sent, or ``in_place`` is True
            and the tensor's memory cannot be written to as one block.
    """
    try:
        if tensor.is_cpu and tensor.dtype in _PLAIN and tensor.is_contiguous():
            return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()
    except (AttributeError, RuntimeError, TypeError):
        pass  # Not a tensor, a sparse tensor, or a lazily negated tensor. Handled below.
    host = host_tensor(tensor)
    if in_place:
        check_in_place(tensor)
    return view_of(host)


def resizable_view(tensor: torch.Tensor) -> Array:
    """Return a NumPy view of a contiguous CPU tensor whose storage can be resized later, as in FSDP.

    ``Tensor.numpy()`` would permanently prevent resizing.

    Raises:
        ArgumentError: NumPy has no equivalent of the tensor's dtype.
    """
    dtype = view_of(tensor.new_empty(0)).dtype
    return array_at(tensor.data_ptr(), tuple(tensor.shape), dtype, tensor)


def from_array(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def check_in_place(tensor: torch.Tensor) -> None:
    """Raise ArgumentError if a tensor's memory cannot be written to as one contiguous block."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"An in-place operation needs a contiguous tensor, but this tensor has strides {tensor.stride()} "
            f"for shape {tuple(tensor.shape)}. Use tensor.contiguous(), or the out-of-place function."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            "In-place operations do not support lazily conjugated or negated views. Materialize the tensor "
            "with tensor.resolve_conj().resolve_neg(), or use the out-of-place function."
        )


def sample_of(parameters: Sequence[Tensor]) -> Array:
    """Return a sample of the parameters' elements to compare across ranks.

    See ``training.gradients.weights``.
    """

    def take(one: Tensor) -> tuple[int, Array]:
        if one.is_complex():
            one = torch.view_as_real(one)
        if not one.is_floating_point():
            raise TypeError("Only floating-point parameters can be compared.")
        size = one.numel()
        places = torch.arange(0, size, step_of(size), device=one.device)
        return size, one.detach().take(places).float().cpu().numpy()

    return np.concatenate([np.empty(0, np.float32), *rows_of(parameters, take)])
