"""The process group of the backend "ringdance", with the methods that torch calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.core.transfers import Transfer
from ringdance.torch._private import sparse_entries
from ringdance.torch.backend.calls import EngineGroup, by_nccl, collective, tensors_in
from ringdance.torch.backend.flat import (
    Tensors,
    apart,
    bytes_note,
    check_dtypes,
    distribute,
    flat,
    shaped,
    shapes_of,
)  # fmt: skip
from ringdance.torch.backend.works import GroupWork
from ringdance.torch.memory import Array, array_of, from_array
from ringdance.training import session

_OPERATIONS = {
    "SUM": ReduceOp.SUM, "AVG": ReduceOp.AVERAGE, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
}  # fmt: skip
_TAGS = 1 << 30  # Upper bound for message tags, exclusive.


class ProcessGroup(EngineGroup):
    """A process group of some or all ranks. torch calls the methods and passes its own option objects.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        set_id: Number of the group's process set in the engine.
    """

    _name = _description = ""

    # torch reads this to find out which devices a group supports.
    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def getBackendName(self) -> str:
        return "ringdance"

    name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the group for tensors on a device. torch 2.14 calls this before a send or receive."""
        return self.nccl if torch.device(device).type != "cpu" and torch.cuda.is_available() else self

    # -- reductions ------------------------------------------------------------------------------

    @collective
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._reduce(tensors, opts or dist.AllreduceOptions())

    @collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._reduce(tensors, opts or dist.AllreduceCoalescedOptions())

    @collective
    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        root = self._root("reduce", opts)
        if self.rank() != root:
            tensors = [tensor.detach().clone() for tensor in tensors]
        return self._reduce(tensors, opts, root)

    def _reduce(self, tensors: Tensors, opts: Any, root: int = -1) -> Any:
        if tensors[0].is_sparse:
            return self._reduce_rows(tensors[0], opts)
        operation = _operation(opts)
        arrays, back = shaped(tensors)
        return self._start(Collective.ALLREDUCE, arrays, arrays, tensors, opts, back, operation, root)

    def _reduce_rows(self, tensor: Tensor, opts: Any) -> Any:
        """Gather the entries of all ranks' sparse tensors, which together represent the sum."""
        indices, values = sparse_entries(tensor)
        if _operation(opts) is not ReduceOp.SUM:
            raise ValueError(
                'The backend "ringdance" reduces sparse tensors only by SUM. Use ReduceOp.SUM or to_dense().'
            )
        arrays = [array_of(indices.t().contiguous()), array_of(values.contiguous())]

        def finish(results: list[Array]) -> None:
            places, sums = (from_array(result) for result in results)
            total = torch.sparse_coo_tensor(places.t(), sums, tensor.shape, check_invariants=False)
            with torch.no_grad():
                tensor.copy_(total.coalesce())  # Copying to tensor.detach() would not change tensor.

        pattern = f"a sparse tensor of shape {tuple(tensor.shape)}"
        return self._start(Collective.ALLGATHER, arrays, None, [tensor], opts, finish, pattern=pattern)

    @collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    @collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        sizes = [[output.numel()] * self.size() for output in outputs]
        return self._reduce_scatter(outputs, inputs, sizes, opts, f"inputs of {shapes_of(inputs)}")

    @collective
    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> Any:
        sizes = [[part.numel() for part in parts] for parts in input_lists]
        joined = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in input_lists]
        pattern = f"inputs of {'; '.join(shapes_of(parts) for parts in input_lists)}"
        return self._reduce_scatter(outputs, joined, sizes, opts, pattern)

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Tensors, sizes: list[list[int]], opts: Any, pattern: str
    ) -> Any:
        """Reduce and scatter inputs. ``sizes`` contains the number of elements per rank for each input."""
        opts = opts or dist.ReduceScatterOptions()
        sources, (targets, back), operation = flat(inputs)[0], flat(outputs), _operation(opts)
        check_dtypes("reduce_scatter", outputs, inputs)
        for source, target, counts in zip(sources, targets, sizes, strict=True):
            if sum(counts) != source.size or counts[self.rank()] != target.size:
                raise ValueError(
                    f"reduce_scatter: the input has {source.size} elements, its parts have {counts}, and "
                    f"this rank's output has {target.size}. The sizes of the parts must add up to the size "
                    "of the input, and this rank's part must be as large as its output."
                )
        equal = all(len(set(counts)) == 1 for counts in sizes)
        if equal and operation in (ReduceOp.SUM, ReduceOp.AVERAGE):
            sources = [apart(*pair) for pair in zip(sources, targets, strict=True)]
            return self._start(
                Collective.REDUCESCATTER, sources, targets, outputs, opts, back, operation, pattern=pattern
            )

        def finish(results: list[Array]) -> None:
            for result, target, counts in zip(results, targets, sizes, strict=True):
                target[...] = result[sum(counts[: self.rank()]) :][: target.size]
            back(results)

        return self._start(
            Collective.ALLREDUCE, sources, None, outputs, opts, finish, operation, pattern=pattern
        )

    # -- data movement ---------------------------------------------------------------------------

    @collective
    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        own, (arrays, back) = self._root("broadcast", opts), shaped(tensors, moved=True)
        root, pattern = session.engine().members(self._set_id)[own], bytes_note(tensors)
        finish = None if own == self.rank() else back  # The root's tensors may be read-only.
        return self._start(
            Collective.BROADCAST, arrays, arrays, tensors, opts, finish, root=root, pattern=pattern
        )

    @collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    @collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        sources, (targets, back) = flat(inputs, moved=True)[0], flat(outputs, moved=True)
        check_dtypes("all_gather", outputs, inputs)
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if target.size != source.size * self.size():
                raise ValueError(
                    f"all_gather: the output has {target.nbytes} bytes, but must have {self.size()} times "
                    f"the {source.nbytes} bytes of the input."
                )
            if source.ctypes.data != target[self.rank() * source.size :].ctypes.data:
                sources[index] = apart(source, target)
        pattern = f"inputs of {shapes_of(inputs)}{bytes_note(inputs)}"
        return self._start(Collective.ALLGATHER, sources, targets, outputs, opts, back, pattern=pattern)

    @collective
    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        sources, _ = flat(inputs, moved=True)
        sizes = [[part.numel() for part in parts] for parts in output_lists]
        for tensor, counts in zip(inputs, sizes, strict=True):
            if counts[self.rank()] != tensor.numel():
                raise ValueError(
                    f"all_gather: the input has {tensor.numel()} elements, but the outputs have {counts}. "
                    "This rank's output must be as large as its input."
                )

        def finish(results: list[Array]) -> None:
            for result, outputs in zip(results, output_lists, strict=True):
                distribute(result, outputs)

        outputs = list(tensors_in(output_lists))
        shapes = "; ".join(shapes_of(parts) for parts in output_lists)
        pattern = f"outputs of {shapes}{bytes_note(inputs)}"
        return self._start(Collective.ALLGATHER, sources, None, outputs, opts, finish, pattern=pattern)

    allgather_coalesced = allgather

    @collective
    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:  # fmt: skip
        (source,), ((target,), back) = flat([given], moved=True)[0], flat([output], moved=True)
        rows, wanted = (
            list(splits) or [len(tensor) // self.size()] * self.size()
            for tensor, splits in ((given, input_splits), (output, output_splits))
        )
        if sum(rows) != len(given) or sum(wanted) != len(output):
            raise ValueError(
                f"all_to_all_single: the input splits {rows} must add up to {len(given)} rows, and the "
                f"output splits {wanted} must add up to {len(output)} rows. If you pass no splits, both row "
                f"counts must be multiples of {self.size()}."
            )
        width, wide = source.size // max(1, len(given)), target.size // max(1, len(output))
        expected = [count * wide for count in wanted]
        splits = [count * width for count in rows]
        pattern = f"all_to_all{bytes_note([given])}"
        source = apart(source, target)
        return self._exchange(source, splits, expected, [output], opts, pattern, [target], back)

    @collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        parts, _ = flat(inputs, moved=True)
        expected = [part.size for part in flat(outputs, moved=True)[0]]
        pattern, splits = f"all_to_all{bytes_note(inputs)}", [part.size for part in parts]
        return self._exchange(np.concatenate(parts), splits, expected, outputs, opts, pattern)

    @collective
    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        (source,), root = flat(inputs, moved=True)[0], self._root("gather", opts)
        splits = [source.size * (rank == root) for rank in range(self.size())]
        outputs = list(tensors_in(output_lists))
        expected = [part.size for part in flat(outputs, moved=True)[0]] or [0] * self.size()
        pattern = f"gather to rank {root}{bytes_note(inputs)}"
        return self._exchange(source, splits, expected, outputs, opts, pattern)

    @collective
    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Any:
        parts, _ = flat(input_lists[0] if input_lists else outputs, moved=True)
        splits = [part.size for part in parts] if input_lists else [0] * self.size()
        source = np.concatenate(parts) if input_lists else parts[0][:0]
        own, root = flat(outputs, moved=True)[0][0].size, self._root("scatter", opts)
        expected = [own * (rank == root) for rank in range(self.size())]
        pattern = f"scatter from rank {root}{bytes_note(outputs)}"
        return self._exchange(source, splits, expected, outputs, opts, pattern)

    def barrier(self, opts: Any = None) -> Any:
        opts, engine = opts or dist.BarrierOptions(), session.engine()
        request = Request(Description(Collective.BARRIER), set_id=self._set_id)
        work = engine.submit(request, wake=getattr(opts, "asyncOp", True))
        return GroupWork(engine, self._set_id, [work], [], [], None, self._seconds(opts))

    # -- point-to-point --------------------------------------------------------------------------

    @by_nccl
    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._transfer("send", rank, tag, tensors)

    @by_nccl
    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Any:
        return self._transfer("receive", rank, tag, tensors)

    @by_nccl
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._transfer("receive", None, tag, tensors)

    def _transfer(self, verb: str, rank: int | None, tag: int, tensors: Tensors) -> Any:
        engine, ((array,), back) = session.engine(), flat(tensors, moved=True)
        state = engine.sets.find(self._set_id).state
        if state is None or not 0 <= tag < _TAGS:
            raise ValueError(
                f"{verb}: a message needs a group of two or more ranks and a tag in [0, {_TAGS}), but got "
                f"tag={tag}."
            )
        if rank is not None and (not 0 <= rank < self.size() or rank == self.rank()):
            raise ValueError(
                f"{verb}: rank {rank} is not another rank in this group of {self.size()} ranks. Pass the "
                "group rank of a different member."
            )
        if engine.closed:
            raise engine.end.error()
        pending = getattr(state.transport, verb)(array.view(np.uint8), rank, tag)
        work = Transfer(engine, pending, state, verb, array.nbytes, rank, tag)
        finish = back if verb == "receive" else None
        return GroupWork(engine, self._set_id, [work], [], tensors, finish, self._seconds(None))

    # Older names of these methods, for earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _operation(opts: Any) -> ReduceOp:
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2]
    if name not in _OPERATIONS:
        raise ValueError(
            f'The backend "ringdance" does not support ReduceOp.{name}. Use SUM, AVG, MIN, MAX or PRODUCT.'
        )
    return _OPERATIONS[name]
