"""Convert the tensors of a torch.distributed call to flat NumPy views, and copy the results back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ringdance.torch.backend.works import Finish
from ringdance.torch.memory import Array, resizable_view

Tensors = Sequence[Tensor]


def check_dtypes(name: str, outputs: Tensors, inputs: Tensors) -> None:
    """Raise ValueError if an output and its input have different dtypes."""
    for output, source in zip(outputs, inputs, strict=True):
        if output.dtype is not source.dtype:
            raise ValueError(
                f"{name}: the output has dtype {output.dtype}, but the input has dtype {source.dtype}. Use "
                "the same dtype for both."
            )


def shapes_of(tensors: Tensors) -> str:
    """Return the shapes of tensors as text for a call's ``pattern``, which must be the same on all ranks."""
    return "shapes " + ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def bytes_note(tensors: Tensors) -> str:
    """Return the dtypes of 1-byte tensors as text for a call's ``pattern``.

    These tensors are sent as bytes, so the engine cannot compare their dtypes itself.
    """
    return "".join(f" {one.dtype}" for one in tensors if one.element_size() == 1)


def shaped(tensors: Tensors, moved: bool = False) -> tuple[list[Array], Finish]:
    """Like ``flat``, but the views have the shapes of the tensors, which must be the same on all ranks."""
    arrays, finish = flat(tensors, moved)
    # DistributedDataParallel.join() passes a tensor of shape () on one rank and (1,) on another.
    return [array.reshape(item.shape or (1,)) for array, item in zip(arrays, tensors, strict=True)], finish


def flat(tensors: Tensors, moved: bool = False) -> tuple[list[Array], Finish]:
    """Return flat views of tensors, and a function that copies results back to the tensors.

    Non-contiguous tensors are copied first, and the views refer to the copies.

    Args:
        tensors: Tensors of any shape.
        moved: True if the call only moves data. Tensors with 1-byte dtypes are then sent as bytes, because
            NumPy does not have all of these dtypes.
    """
    arrays, copies = [], []
    for tensor in tensors:
        plain = tensor.detach()
        whole = plain.resolve_conj().resolve_neg().contiguous()
        if whole.data_ptr() != plain.data_ptr() or plain.is_neg() or plain.is_conj():
            copies.append((plain, whole))
        row = whole.view(-1)
        if moved and row.element_size() == 1:
            row = row.view(torch.uint8)
        arrays.append(resizable_view(row))

    def finish(_: list[Array]) -> None:
        for plain, whole in copies:
            plain.copy_(whole)

    return arrays, finish


def distribute(result: Array, outputs: Tensors) -> None:
    """Split a flat result and copy its parts to the outputs."""
    targets, finish = flat(outputs, moved=True)
    if sum(target.size for target in targets) != result.size:
        raise ValueError(
            "The outputs and the tensors that the ranks sent have different sizes. Make the sizes match."
        )
    start = 0
    for target in targets:
        target[...] = result[start : start + target.size]
        start += target.size
    finish([])


def apart(source: Array, target: Array) -> Array:
    """Return ``source``, or a copy of it if writing the results to ``target`` would overwrite it."""
    return source.copy() if np.may_share_memory(source, target) else source
