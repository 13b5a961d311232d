"""Give ``training.gradients.exchange.GradientExchange`` access to a torch optimizer's gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringdance.core.request import Work
from ringdance.torch._private import sparse_entries
from ringdance.torch.device.direct import Launched, direct_exchange
from ringdance.torch.device.exchange import TorchExchange
from ringdance.torch.device.streams import await_results, wait_on_host
from ringdance.torch.exchange import any_by_torch, stays, submit
from ringdance.torch.memory import Array, Compression, block_of, from_array, host_tensor, sample_of, view_of
from ringdance.training.gradients.source import AS_DENSE, DENSE
from ringdance.training.gradients.sparse import Rows

if TYPE_CHECKING:
    from ringdance.core.engine import Engine
    from ringdance.training.collectives import Call

# Compressors that work element by element, so that several tensors can be compressed as one flat tensor.
_CASTS = (Compression.none, Compression.fp16, Compression.bf16)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # Inference tensors have no version counter.


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return pinned CPU copies of GPU tensors. All copies start before the first wait."""
    staged = [
        torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=True).copy_(one, non_blocking=True)
        for one in tensors
    ]
    for device in {tensor.device for tensor in tensors}:
        torch.cuda.current_stream(device).synchronize()
    return staged


class Gradients:
    """The gradients of ``parameters``, by index. See ``training.gradients.source.GradientSource``.

    A dense contiguous gradient on the CPU is reduced in place. Other gradients (on a GPU, compressed, or
    non-contiguous as in channels_last) are reduced in a copy, and ``write_back`` copies the results back. The
    list ``parameters`` may grow (see ``GradientExchange.extend``).
    """

    advice = (
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
    )

    def __init__(self, parameters: Sequence[Tensor], compression: Any, sparse_as_dense: bool) -> None:
        self.parameters = parameters
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        # Weak references to the gradients that hold the result of an exchange. They may be freed at any time.
        self._left: dict[int, weakref.ref[Tensor]] = {}
        self._versions: dict[int, int] = {}  # Version counters, after a step, of the gradients in _left.
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        # Arguments of _write_sent for each bucket that was sent without a copy to the host.
        self._sent: dict[tuple[int, ...], tuple[Work | Launched, list[Any], Any]] = {}
        self._direct: TorchExchange | None = None
        self._opened = 0
        self._delivered: Any = None  # Recorded after the last bucket was written back.
        # The gradients' dtypes in each bucket that was sent after a round of agreement.
        self._agreed: dict[tuple[int, ...], list[torch.dtype]] = {}

    @property
    def on_device(self) -> bool:
        """True if torch's communicator exchanges dense gradients on this device. See ``exchange.stays``."""
        return any_by_torch(self.parameters)

    def nbytes(self, index: int) -> int:
        """Return the size of a parameter's gradient in bytes."""
        return self.parameters[index].nbytes

    def sample(self, indices: Sequence[int], names: Sequence[str]) -> tuple[list[str], Array]:
        """Return descriptions of parameters, and a sample of their elements to compare across ranks.

        A description is the parameter's name or, for an unnamed parameter, its index and shape.
        """
        parameters = [self.parameters[index] for index in indices]
        shown = [
            f"parameter {index}, of shape {tuple(parameter.shape)}" if ".noname." in name else name
            for index, name, parameter in zip(indices, names, parameters, strict=True)
        ]
        return shown, sample_of(parameters)

    def kinds(self, computed: bytearray, indices: Sequence[int] | None = None) -> bytearray:
        """Return each gradient's kind (see ``AS_DENSE`` and ``DENSE``), or 0 if it is not ``computed``."""
        kinds = bytearray()
        for index in range(len(computed)) if indices is None else indices:
            gradient = self.parameters[index].grad if computed[index] else None
            kind = 0 if gradient is None else DENSE
            if gradient is not None and gradient.is_sparse:
                kind = gradient.sparse_dim() + (AS_DENSE if self.sparse_as_dense else 0)
            kinds.append(kind)
        return kinds

    def unreduced(self, computed: bytearray) -> list[int]:
        """Return the indices of gradients that were neither ``computed`` nor set by ``write_back``."""
        if 0 not in computed:
            return []
        unreduced, left = [], self._left
        for index, (parameter, known) in enumerate(zip(self.parameters, computed, strict=True)):
            if not known and (gradient := parameter.grad) is not None:
                last = left.get(index)
                if last is None or last() is not gradient:
                    unreduced.append(index)
        return unreduced

    def forget(self) -> None:
        """Stop treating gradients as results of an exchange. Called when all gradients are cleared."""
        self._left.clear()

    def settle(self) -> None:
        """Record the end of a step. Later changes to reduced gradients belong to the next step."""
        left = {index: reference() for index, reference in self._left.items()}
        self._versions = {index: _version_of(grad) for index, grad in left.items() if grad is not None}

    def forget_changed(self) -> None:
        """Stop treating gradients as results of an exchange if they have changed since ``settle``."""
        for index, version in self._versions.items():
            gradient = self._left[index]() if index in self._left else None
            if gradient is not None and _version_of(gradient) != version:
                del self._left[index]

    def buffers(self, indices: Sequence[int], zeros: bytes) -> tuple[Array, ...]:
        """Return contiguous arrays to reduce in place.

        An array contains zeros if its gradient is missing or marked in ``zeros``.
        """
        views = None if zeros else self.gradient_views(indices)
        if views is not None:
            return views
        gradients = []
        for index in indices:
            parameter = self.parameters[index]
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                gradient = parameter.grad = gradient.to_dense()
            if zeros and zeros[index]:
                gradient.zero_()
            gradients.append(gradient.detach())
        if self.compression is Compression.none and all([g.is_cpu and block_of(g) is g for g in gradients]):
            return tuple([view_of(gradient) for gradient in gradients])
        return tuple(self._copied(indices, gradients))

    def send(self, call: Call, engine: Engine, indices: Sequence[int], zeros: bytes, wake: bool) -> Work:
        """Submit the reduction of gradients, in place or on copies, on their device or on the host."""
        if self.on_device:
            gradients = self._dense(indices, zeros)
            pairs = [self.compression.compress(gradient) for gradient in gradients]
            if stays(call, [small for small, _ in pairs], engine):
                self._agreed[tuple(indices)] = [gradient.dtype for gradient in gradients]
                work = submit(call, [small for small, _ in pairs], in_place=True, wake=wake)
                self._sent[tuple(indices)] = work, [context for _, context in pairs], None
                return work
        views = self.buffers(indices, zeros)
        return call.submit(engine, views, views, wake=wake)

    def open_direct(self, engine: Engine, set_id: int, name: str) -> bool:
        """Create the communicator for ``launch``, if possible. Blocks until all members have called this."""
        devices = {parameter.device for parameter in self.parameters}
        if self._direct is None and self.compression in _CASTS and len(devices) == 1:
            self._opened += 1  # The count is the same on all members.
            name = f"{name} {self._opened}"
            self._direct = direct_exchange(engine, set_id, self.parameters[0].device.type, name)
        return self._direct is not None

    def launch(self, call: Call, indices: Sequence[int]) -> Launched | None:
        """Start reducing one flat copy of the gradients per dtype, without a round of agreement.

        Returns None if the dtypes have changed since the last round of agreement.
        """
        assert self._direct is not None
        gradients = self._dense(indices, b"")
        if self._agreed.get(tuple(indices)) != [gradient.dtype for gradient in gradients]:
            return None
        places = {dtype: [n for n, one in enumerate(gradients) if one.dtype is dtype] for dtype in
                  dict.fromkeys(gradient.dtype for gradient in gradients)}  # fmt: skip
        flats = [torch.cat([gradients[n].reshape(-1) for n in chosen]) for chosen in places.values()]
        pairs = [self.compression.compress(flat) for flat in flats]
        work = Launched(self._direct, call, [small for small, _ in pairs])
        self._sent[tuple(indices)] = work, [context for _, context in pairs], list(places.values())
        return work

    def close_direct(self) -> None:
        """Abort the communicator for ``launch``, once the buckets of earlier passes are complete.

        The host runs ahead of the GPU, so the GPU may still be exchanging these buckets.
        """
        if self._direct is not None:
            wait_on_host(self._delivered)
            self._direct.close(False)
            self._direct = self._delivered = None

    def _dense(self, indices: Sequence[int], zeros: bytes) -> list[Tensor]:
        """Return gradients as dense contiguous tensors, without modifying the gradients.

        A gradient that is missing or marked in ``zeros`` is returned as zeros.
        """
        gradients = []
        for index in indices:
            parameter = self.parameters[index]
            gradient = None if zeros and zeros[index] else parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            gradients.append(block_of(gradient.to_dense() if gradient.is_sparse else gradient))
        return gradients

    def _write_sent(
        self, indices: Sequence[int], work: Work | Launched, contexts: list[Any],
        places: list[list[int]] | None,
    ) -> None:
        """Copy results of ``send`` or ``launch`` to the gradients.

        ``places`` contains the positions of the gradients in each flat tensor, or is None for ``send``.
        """
        pairs = zip(await_results(work.result), contexts, strict=True)
        results = [self.compression.decompress(*pair) for pair in pairs]
        if places is not None:
            self._delivered = work.result.event
            parts: dict[int, Tensor] = {}
            for flat, chosen in zip(results, places, strict=True):
                sizes = [self.parameters[indices[n]].numel() for n in chosen]
                parts.update(zip(chosen, torch.split(flat, sizes), strict=True))
            results = [parts[n].view(self.parameters[index].shape) for n, index in enumerate(indices)]
        targets, sources = [], []
        for index, result in zip(indices, results, strict=True):
            gradient = self.parameters[index].grad
            if gradient is None or gradient.is_sparse or gradient.is_conj() or gradient.is_neg():
                self.parameters[index].grad = result.clone() if places else result
            elif gradient.data_ptr() != result.data_ptr():
                targets.append(gradient.detach())
                sources.append(result)
        if targets:
            torch._foreach_copy_(targets, sources)

    def gradient_views(self, indices: Sequence[int]) -> tuple[Array, ...] | None:
        """Return views of the gradients, or None unless all are dense, contiguous and on the CPU."""
        if self.compression is not Compression.none:
            return None
        try:
            # Raises for None and for tensors that NumPy rejects (GPU, sparse, bfloat16, or requiring grad).
            views = tuple([self.parameters[n].grad.numpy() for n in indices])  # type: ignore[union-attr]
        except (AttributeError, TypeError, RuntimeError):
            return None
        return views if all([view.flags.c_contiguous for view in views]) else None

    def _copied(self, indices: Sequence[int], gradients: list[Tensor]) -> list[Array]:
        packed = [self.compression.compress(gradient) for gradient in gradients]
        on_gpu = [small for small, _ in packed if not small.is_cpu]
        staged = iter(host_copies(on_gpu)) if on_gpu else iter(())
        views = []
        for index, gradient, (small, context) in zip(indices, gradients, packed, strict=True):
            wire = next(staged) if not small.is_cpu else host_tensor(small)
            if wire is not gradient:
                self._copies[index] = (wire, context)
            views.append(view_of(wire))
        return views

    def write_back(self, indices: Sequence[int], union: bytes) -> None:
        """Copy results from reduced copies to the gradients, and convert them back to sparse if needed."""
        if (sent := self._sent.pop(tuple(indices), None)) is not None:
            self._write_sent(indices, *sent)
        if self._copies:
            for index in indices:
                copied = self._copies.pop(index, None)
                gradient = self.parameters[index].grad
                if copied is not None and gradient is not None:
                    gradient.detach().copy_(self.compression.decompress(*copied))
        for index in indices if union.count(DENSE) < len(union) else ():
            gradient = self.parameters[index].grad
            if union[index] < DENSE and gradient is not None:
                self.parameters[index].grad = gradient.to_sparse(union[index] - AS_DENSE)
        left = self._left
        for index in indices:
            if (gradient := self.parameters[index].grad) is not None:
                left[index] = weakref.ref(gradient)

    def sparse_rows(self, index: int, sparse_dims: int) -> Rows:
        """Return the entries of a sparse gradient. See ``training.gradients.source.GradientSource``."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        shape = tuple(parameter.shape)
        if gradient is None:
            positions = torch.empty((sparse_dims, 0), dtype=torch.int64)
            values = torch.empty((0, *shape[sparse_dims:]), dtype=parameter.dtype)
        else:
            if not gradient.is_sparse:
                gradient = gradient.to_sparse(sparse_dims)
            positions, values = sparse_entries(gradient)
        rows = view_of(host_tensor(positions.contiguous()))
        keys = rows[0] if sparse_dims == 1 else np.ravel_multi_index(tuple(rows), shape[:sparse_dims])
        return Rows(keys, view_of(host_tensor(values.contiguous())), math.prod(shape[:sparse_dims]))

    def write_back_sparse(self, index: int, sparse_dims: int, rows: Rows) -> None:
        """Set the gradient to the merged entries of all ranks."""
        parameter = self.parameters[index]
        positions = np.stack(np.unravel_index(rows.keys, tuple(parameter.shape[:sparse_dims])))
        joined = torch.sparse_coo_tensor(
            from_array(positions), from_array(rows.values), parameter.shape, check_invariants=False,
            is_coalesced=True,
        )
        parameter.grad = gradient = joined.to(parameter.device)
        self._left[index] = weakref.ref(gradient)
