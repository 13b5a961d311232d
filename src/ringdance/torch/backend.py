"""The backend "ringdance" of torch.distributed: ``dist.init_process_group("ringdance")``.

Collectives on CPU tensors go through the engine, so DistributedDataParallel, FSDP and libraries built on them
exchange through shared memory and MPI. Collectives on GPU tensors are left to NCCL. torch finds the backend
through ``ringdance.training.torch_entry_point``.

Results, order and errors match torch's own backends: calls of a group match by their order, results replace
output tensors, and a ``Work`` that has failed raises in ``wait()``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.core.transfers import Transfer
from ringdance.errors import CollectiveError
from ringdance.torch._private import register_work, renamed, sparse_entries
from ringdance.torch.flat import Tensors, apart, bytes_note, check_dtypes, distribute, flat, shaped, shapes_of
from ringdance.torch.groups import Group, of_this_attempt, process_set
from ringdance.torch.memory import Array, array_of, from_array
from ringdance.torch.works import Finish, GroupWork, starts_now, wait_at_end
from ringdance.training import session
from ringdance.training.collectives import Call, prepared

_OPERATIONS = {
    "SUM": ReduceOp.SUM, "AVG": ReduceOp.AVERAGE, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
}  # fmt: skip
_SMALL_BYTES = 4096
_TAGS = 1 << 30  # Limit for the tags of messages.
_prefixed: Any = vars(dist)["PrefixStore"]


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Create a process group. torch calls this on its members. See ``groups.process_set``."""
    options.store = of_this_attempt(options.store)
    return ProcessGroup(options, process_set(options))


def _by_nccl(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a call on GPU tensors to NCCL."""

    @functools.wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = next(_tensors_in(args), None)
        if tensor is None or tensor.is_cpu:
            return method(self, *args, **kwargs)
        return renamed(self.nccl, method.__name__)(*args, **kwargs)

    return call


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a call on GPU tensors to NCCL. A wrong argument on this rank fails the call on the peers too."""

    @functools.wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        number = self._set_id
        try:
            return method(self, *args, **kwargs)
        except CollectiveError:  # The call was submitted, or the job has ended.
            raise
        except Exception as error:
            Call(Collective.ALLREDUCE, set_id=number).refuse(session.engine(), error)
            raise

    return _by_nccl(call)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class ProcessGroup(Group):
    """Some or all ranks. torch calls the methods, with its own option objects.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        set_id: The ranks' process set in the engine.
    """

    def __init__(self, options: Any, set_id: int) -> None:
        super().__init__(options, set_id)
        self._options, self._timeout = options, options.timeout
        self._name = self._description = ""
        self._coalesced: list[GroupWork] | None = None  # The calls since start_coalescing.
        self._recent: deque[GroupWork] = deque(maxlen=1024)

    # torch reads this to learn which devices a group supports.
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

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the group for tensors on a device. torch 2.14 calls this before point-to-point calls."""
        return self.nccl if torch.device(device).type != "cpu" and torch.cuda.is_available() else self

    def start_coalescing(self, device: Any) -> None:
        if device.type != "cpu":
            self.nccl._start_coalescing()
        else:
            self._coalesced = []

    def end_coalescing(self, device: Any) -> Any:
        """Return one work for all calls since the start."""
        if device.type != "cpu":
            return self.nccl._end_coalescing()
        works, self._coalesced = self._coalesced or [], None
        return GroupWork.of_all(session.engine(), self._set_id, works, self._seconds(None))

    @functools.cached_property
    def nccl(self) -> Any:
        """The NCCL group of these ranks, which exchanges GPU tensors."""
        if not dist.is_nccl_available():
            raise RuntimeError('The backend "ringdance" leaves GPU tensors to NCCL, which this torch lacks.')
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = self._timeout
        store = _prefixed("nccl", self._options.store)
        return dist.ProcessGroupNCCL(store, self.rank(), self.size(), nccl_options)

    # -- reductions ------------------------------------------------------------------------------

    @_collective
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._reduce(tensors, opts or dist.AllreduceOptions())

    @_collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._reduce(tensors, opts or dist.AllreduceCoalescedOptions())

    @_collective
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
        """Gather the entries of a sparse tensor. Together, they are the sum."""
        indices, values = sparse_entries(tensor)
        if _operation(opts) is not ReduceOp.SUM:
            raise ValueError('The backend "ringdance" reduces sparse tensors by SUM only.')
        arrays = [array_of(indices.t().contiguous()), array_of(values.contiguous())]

        def finish(results: list[Array]) -> None:
            places, sums = (from_array(result) for result in results)
            total = torch.sparse_coo_tensor(places.t(), sums, tensor.shape, check_invariants=False)
            with torch.no_grad():
                tensor.copy_(total.coalesce())  # A detached tensor would get entries of its own.

        pattern = f"a sparse tensor of shape {tuple(tensor.shape)}"
        return self._start(Collective.ALLGATHER, arrays, None, [tensor], opts, finish, pattern=pattern)

    @_collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    @_collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        sizes = [[output.numel()] * self.size() for output in outputs]
        return self._reduce_scatter(outputs, inputs, sizes, opts, f"inputs of {shapes_of(inputs)}")

    @_collective
    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> Any:
        sizes = [[part.numel() for part in parts] for parts in input_lists]
        joined = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in input_lists]
        pattern = f"inputs of {'; '.join(shapes_of(parts) for parts in input_lists)}"
        return self._reduce_scatter(outputs, joined, sizes, opts, pattern)

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Tensors, sizes: list[list[int]], opts: Any, pattern: str
    ) -> Any:
        """Reduce inputs. ``sizes``: for each input, the number of elements for every rank."""
        opts = opts or dist.ReduceScatterOptions()
        sources, (targets, back), operation = flat(inputs)[0], flat(outputs), _operation(opts)
        check_dtypes("reduce_scatter", outputs, inputs)
        for source, target, counts in zip(sources, targets, sizes, strict=True):
            if sum(counts) != source.size or counts[self.rank()] != target.size:
                raise ValueError(
                    f"reduce_scatter: an input of {source.size} elements cannot be divided into {counts}, "
                    f"or this rank's output has the wrong size, {target.size}."
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

    # -- moving data -----------------------------------------------------------------------------

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        own, (arrays, back) = self._root("broadcast", opts), shaped(tensors, moved=True)
        root, pattern = session.engine().members(self._set_id)[own], bytes_note(tensors)
        if own == self.rank():  # The root's tensors do not change, and may not be writable.
            back = _nothing
        return self._start(
            Collective.BROADCAST, arrays, arrays, tensors, opts, back, root=root, pattern=pattern
        )

    @_collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    @_collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        sources, (targets, back) = flat(inputs, moved=True)[0], flat(outputs, moved=True)
        check_dtypes("all_gather", outputs, inputs)
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if target.size != source.size * self.size():
                raise ValueError(
                    f"all_gather: an output of {target.nbytes} bytes is not {self.size()} times "
                    f"the input's {source.nbytes}."
                )
            if source.ctypes.data != target[self.rank() * source.size :].ctypes.data:
                sources[index] = apart(source, target)
        pattern = f"inputs of {shapes_of(inputs)}{bytes_note(inputs)}"
        return self._start(Collective.ALLGATHER, sources, targets, outputs, opts, back, pattern=pattern)

    @_collective
    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        sources, _ = flat(inputs, moved=True)
        sizes = [[part.numel() for part in parts] for parts in output_lists]
        for tensor, counts in zip(inputs, sizes, strict=True):
            if counts[self.rank()] != tensor.numel():
                raise ValueError(f"all_gather: {tensor.numel()} elements do not fit outputs of {counts}.")

        def finish(results: list[Array]) -> None:
            for result, outputs in zip(results, output_lists, strict=True):
                distribute(result, outputs)

        outputs = list(_tensors_in(output_lists))
        shapes = "; ".join(shapes_of(parts) for parts in output_lists)
        pattern = f"outputs of {shapes}{bytes_note(inputs)}"
        return self._start(Collective.ALLGATHER, sources, None, outputs, opts, finish, pattern=pattern)

    allgather_coalesced = allgather

    @_collective
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
                f"all_to_all_single: splits {rows} and {wanted} do not add up to the rows of the input, "
                f"{len(given)}, and the output, {len(output)}. Without splits {self.size()} must divide them."
            )
        width, wide = source.size // max(1, len(given)), target.size // max(1, len(output))
        expected = [count * wide for count in wanted]
        splits = [count * width for count in rows]
        pattern = f"all_to_all{bytes_note([given])}"
        source = apart(source, target)
        return self._exchange(source, splits, expected, [output], opts, pattern, [target], back)

    @_collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        parts, _ = flat(inputs, moved=True)
        expected = [part.size for part in flat(outputs, moved=True)[0]]
        pattern, splits = f"all_to_all{bytes_note(inputs)}", [part.size for part in parts]
        return self._exchange(np.concatenate(parts), splits, expected, outputs, opts, pattern)

    @_collective
    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        (source,), root = flat(inputs, moved=True)[0], self._root("gather", opts)
        splits = [source.size * (rank == root) for rank in range(self.size())]
        outputs = list(_tensors_in(output_lists))
        expected = [part.size for part in flat(outputs, moved=True)[0]] or [0] * self.size()
        pattern = f"gather to rank {root}{bytes_note(inputs)}"
        return self._exchange(source, splits, expected, outputs, opts, pattern)

    @_collective
    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Any:
        parts, _ = flat(input_lists[0] if input_lists else outputs, moved=True)
        splits = [part.size for part in parts] if input_lists else [0] * self.size()
        source = np.concatenate(parts) if input_lists else parts[0][:0]
        own, root = flat(outputs, moved=True)[0][0].size, self._root("scatter", opts)
        expected = [own * (rank == root) for rank in range(self.size())]
        pattern = f"scatter from rank {root}{bytes_note(outputs)}"
        return self._exchange(source, splits, expected, outputs, opts, pattern)

    def _exchange(
        self, source: Array, splits: list[int], expected: list[int], outputs: Tensors, opts: Any,
        pattern: str, targets: list[Array] | None = None, finish: Finish | None = None,
    ) -> Any:
        """Send parts of flat ``source`` to the ranks, and split the received data of ``expected`` sizes."""
        finish = finish or (lambda results: distribute(results[0], outputs))
        rows = [np.array(splits, np.int64)]
        return self._start(
            Collective.ALLTOALL, [source], targets, outputs, opts, finish, splits=rows, expected=expected,
            pattern=pattern,
        )

    def barrier(self, opts: Any = None) -> Any:
        opts, engine = opts or dist.BarrierOptions(), session.engine()
        request = Request(Description(Collective.BARRIER), set_id=self._set_id)
        work = engine.submit(request, wake=getattr(opts, "asyncOp", True))
        return GroupWork(engine, self._set_id, [work], [], [], None, self._seconds(opts))

    # -- two ranks -------------------------------------------------------------------------------

    @_by_nccl
    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._transfer("send", rank, tag, tensors)

    @_by_nccl
    def recv(self, tensors: Tensors, rank: int | None, tag: int = 0) -> Any:
        return self._transfer("receive", rank, tag, tensors)

    @_by_nccl
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._transfer("receive", None, tag, tensors)

    def _transfer(self, verb: str, rank: int | None, tag: int, tensors: Tensors) -> Any:
        engine, ((array,), back) = session.engine(), flat(tensors, moved=True)
        state = engine.sets.find(self._set_id).state
        if state is None or not 0 <= tag < _TAGS:
            raise ValueError(f"{verb}: this group has only one rank, or tag={tag} is not below {_TAGS}.")
        if rank is not None and (not 0 <= rank < self.size() or rank == self.rank()):
            raise ValueError(f"{verb}: rank {rank} is not another rank of the {self.size()} in this group.")
        if engine.closed:
            raise engine.end.error()
        pending = getattr(state.transport, verb)(array.view(np.uint8), rank, tag)
        work = Transfer(engine, pending, state, verb, array.nbytes, rank, tag)
        finish = back if verb == "receive" else _nothing
        return GroupWork(engine, self._set_id, [work], [], tensors, finish, self._seconds(None))

    # -- one path to the engine ------------------------------------------------------------------

    def _root(self, name: str, opts: Any) -> int:
        """Return the rank within this group that is a call's root."""
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"{name}: rank {root} does not exist in this group of {self.size()}.")
        return root

    def _seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)  # Negative in torch's options if not set.
        chosen = timeout if timeout is not None and timeout.total_seconds() > 0 else self._timeout
        return float(chosen.total_seconds())

    def _start(
        self, kind: Collective, arrays: Sequence[Array], targets: Sequence[Array] | None, tensors: Tensors,
        opts: Any, finish: Finish, operation: ReduceOp = ReduceOp.SUM, root: int = -1,
        splits: Sequence[Array] | None = None, expected: list[int] | None = None, pattern: str = "",
    ) -> GroupWork:
        """Submit a call.

        Args:
            kind: The collective.
            arrays: Arrays to send.
            targets: Memory for the results, or None to let the engine allocate.
            tensors: Tensors that are the result of the ``Work``.
            opts: torch's options.
            finish: Called once with the results.
            operation: Operation, if the call is a reduction.
            root: Root: a global rank for a broadcast, a rank in the group for a reduction.
            splits: Splits of an alltoall.
            expected: For an alltoall, the sizes that must come from each rank.
            pattern: Text that must be equal on all ranks.
        """
        engine, waits_later = session.engine(), getattr(opts, "asyncOp", True)
        call = prepared(kind, None, operation, 1.0, 1.0, self._set_id, root, len(arrays) > 1, pattern=pattern)
        outputs = None if targets is None else tuple(targets)
        work = call.submit(engine, tuple(arrays), outputs, splits, waits_later and starts_now(engine))
        seconds = self._seconds(opts)
        started = GroupWork(
            engine, self._set_id, [work], list(targets or ()), tensors, finish, seconds, expected
        )
        if self._coalesced is not None:
            self._coalesced.append(started)
        if waits_later:
            wait_at_end(started)
            register_work(tensors, started)
            if len(tensors) == 1 and tensors[0].numel() == 1 and not tensors[0].is_sparse:
                self._keep(started, tensors[0])
        return started

    def _keep(self, work: GroupWork, number: Tensor) -> None:
        """Keep the work of a single number alive, for DistributedDataParallel.join().

        It passes such a work to C++, which does not keep the Python object whose ``wait`` it calls.
        """
        if number.untyped_storage().nbytes() <= _SMALL_BYTES:
            self._recent.append(work)

    # Other names by which torch calls these methods.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing


def _operation(opts: Any) -> ReduceOp:
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2]
    if name not in _OPERATIONS:
        raise ValueError(f'The backend "ringdance" lacks {name} here. Use SUM, AVG, MIN, MAX or PRODUCT.')
    return _OPERATIONS[name]


def _nothing(_: list[Array]) -> None:
    pass
