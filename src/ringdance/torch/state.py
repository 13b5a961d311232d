"""Broadcast parameters and optimizer state from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringdance.core.request import Collective
from ringdance.errors import ArgumentError
from ringdance.torch._private import compiler_disable
from ringdance.torch.exchange import copy_back, submit
from ringdance.torch.memory import block_of
from ringdance.training import session
from ringdance.training.collectives import movement
from ringdance.training.objects import broadcast_object
from ringdance.training.process_sets import global_process_set


def _pairs(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, dict):
        return [(str(key), value) for key, value in sorted(params.items())]
    if isinstance(params, (str, bytes, Tensor)) or not isinstance(params, Iterable):
        raise ArgumentError(
            "broadcast_parameters needs model.state_dict(), or tensors, or (name, tensor) pairs, but got "
            f"{type(params).__name__}."
        )
    listed = [
        entry if isinstance(entry, tuple) else (str(index), entry) for index, entry in enumerate(params)
    ]
    if any(len(entry) != 2 for entry in listed):
        raise ArgumentError(
            "broadcast_parameters: a tuple in params does not have two elements. Pass tensors or (name, "
            "tensor) pairs."
        )
    return [(str(name), tensor) for name, tensor in listed]


def _broadcast_all(named: list[tuple[str, Tensor]], root_rank: int) -> None:
    """Overwrite all tensors with the root's values. All broadcasts are submitted before the first wait."""
    engine = session.engine()
    if engine.size == 1:
        return
    pending = []
    for name, tensor in named:
        wire = block_of(tensor)  # This is a copy if the tensor is not contiguous.
        call = movement(Collective.BROADCAST, name, global_process_set, root=root_rank)
        work = submit(call, (wire,), in_place=True)
        pending.append((tensor, wire, work))
    engine.flush()
    for tensor, wire, work in pending:
        work.wait()
        copy_back((wire,), work)
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)


@compiler_disable
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters on all ranks with the parameters of global rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, tensors, or (name, tensor) pairs. Tensors are matched between ranks by
            name or, if unnamed, by position. Entries that are not tensors are skipped.
        root_rank: Global rank of the root.

    Raises:
        ArgumentError: ``params`` has the wrong type.
    """
    _broadcast_all([(name, value) for name, value in _pairs(params) if isinstance(value, Tensor)], root_rank)


class _TensorRef(NamedTuple):
    """Placeholder for a tensor in a structure that is sent as an object."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def _replaced(value: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """Copy nested dicts, lists and tuples, replacing all objects of type ``kind``."""
    if isinstance(value, kind):
        return replacement(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, replacement) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        values = [_replaced(item, kind, replacement) for item in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)  # namedtuple
    return value


def _extract_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Replace each tensor in a structure with a reference, and append the tensors to ``tensors``."""

    def extract(tensor: Tensor) -> _TensorRef:
        tensors.append(tensor)
        return _TensorRef(tuple(tensor.shape), tensor.dtype, tensor.is_cpu)

    return _replaced(value, Tensor, extract)


def _insert_tensors(value: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """Replace each reference in a structure with a new zero tensor, and append these to ``tensors``."""

    def insert(ref: _TensorRef) -> Tensor:
        tensors.append(torch.zeros(ref.shape, dtype=ref.dtype, device="cpu" if ref.on_cpu else device))
        return tensors[-1]

    return _replaced(value, _TensorRef, insert)


@compiler_disable
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Copy the optimizer state and options of global rank ``root_rank`` to all ranks.

    This does not take an optimizer step. The root broadcasts the structure, the other ranks allocate tensors,
    and the tensors are then broadcast in place. Works for any optimizer, with or without state. ``model`` is
    accepted but not needed.

    Raises:
        ArgumentError: The parameter groups on this rank and on the root have different sizes.
    """
    engine = session.engine()
    if engine.size == 1:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    is_root = engine.rank == root_rank
    tensors: list[Tensor] = []
    structure = None
    if is_root:
        state = {number[id(key)]: value for key, value in optimizer.state.items() if id(key) in number}
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        structure = own_sizes, _extract_tensors(state, tensors), _extract_tensors(options, tensors)
    sizes, state, options = broadcast_object(structure, root_rank, name="optimizer_state")
    if not is_root:
        device = {index: parameters[index].device for index in state} if sizes == own_sizes else {}
        default = parameters[0].device if parameters else torch.device("cpu")
        new_state = {
            key: _insert_tensors(value, tensors, device.get(key, default)) for key, value in state.items()
        }
        groups = [_insert_tensors(group, tensors, default) for group in options]
    _broadcast_all([(f"optimizer_state.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank)
    if is_root:
        return
    if sizes != own_sizes:
        raise ArgumentError(
            f"broadcast_optimizer_state: the parameter groups have sizes {sizes} on rank {root_rank}, but "
            f"{own_sizes} on rank {engine.rank}. Build the same model and optimizer on all ranks."
        )
    for key in [key for key in optimizer.state if id(key) in number]:
        del optimizer.state[key]
    for index, value in new_state.items():
        optimizer.state[parameters[index]] = value
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def snapshot(state: Any) -> Any:
    """Return a copy of a state in host memory, which can be saved to a file while training continues.

    Args:
        state: A state_dict, or any structure of dicts, lists and tuples. Only tensors are copied.
    """
    return _replaced(state, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
