"""Submit torch.distributed calls to the engine, or forward them to NCCL."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from torch import Tensor

from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import ArgumentError, CollectiveError
from ringdance.torch._private import register_work, renamed
from ringdance.torch.backend.flat import Tensors, distribute
from ringdance.torch.backend.works import Finish, GroupWork, starts_now, wait_at_end
from ringdance.torch.device.communicators import dist, filled
from ringdance.torch.memory import Array
from ringdance.training import session
from ringdance.training.collectives import Call, prepared

_SMALL_BYTES = 4096


def by_nccl(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that calls on GPU tensors are forwarded to NCCL."""

    @functools.wraps(method)
    def call(self: EngineGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = next(tensors_in(args), None)
        if tensor is None or tensor.is_cpu:
            return method(self, *args, **kwargs)
        return renamed(self.nccl, method.__name__)(*args, **kwargs)

    return call


def collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method as ``by_nccl`` does, and make other ranks' calls fail if it raises an error here."""

    @functools.wraps(method)
    def call(self: EngineGroup, *args: Any, **kwargs: Any) -> Any:
        number = self._set_id
        try:
            return method(self, *args, **kwargs)
        except CollectiveError:  # The call was submitted, or the job has ended.
            raise
        except Exception as error:
            Call(Collective.ALLREDUCE, set_id=number).refuse(session.engine(), error)
            raise

    return by_nccl(call)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in a call's arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class EngineGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Base class of ``ProcessGroup``. Submits the group's calls to the engine.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        set_id: Number of the group's process set in the engine.
    """

    def __init__(self, options: Any, set_id: int) -> None:
        super().__init__(options.group_rank, options.group_size)
        engine = session.engine()
        self._engine, self._number, self._known = weakref.ref(engine), set_id, engine.sets.find(set_id)
        self._options, self._timeout = options, options.timeout
        self._destroyed = False
        self._coalesced: list[GroupWork] | None = None  # Calls made since start_coalescing.
        self._recent: deque[GroupWork] = deque(maxlen=1024)

    @property
    def _set_id(self) -> int:
        """The number of the process set. Raises ArgumentError if the set no longer exists."""
        engine, rank = session.engine(), self.rank()
        if self._destroyed:
            why = "was destroyed"
        elif self._engine() is engine and engine.sets.registered.get(self._number) is not self._known:
            why = "was freed after a call in it had timed out"  # Another group may now use its number.
        elif self._engine() is engine or (not self._number and engine.size == self.size()):
            return self._number
        else:
            why = "belongs to an earlier job, from before shutdown() and init()"
        raise ArgumentError(
            f"This process group of {self.size()} ranks {why} (rank {rank} in the group, {engine.identity}). "
            "Create the group again with new_group() or init_process_group(), and then recreate everything "
            "that uses the group, such as DistributedDataParallel."
        )

    def shutdown(self) -> None:
        """Free the group. Has no effect on the group of all ranks, which is freed when its job ends."""
        engine = self._engine()
        if self._number and not self._destroyed and engine is not None and not engine.closed:
            engine.leave_group(self._number)
        self._destroyed = bool(self._number)

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def start_coalescing(self, device: Any) -> None:
        if device.type != "cpu":
            self.nccl._start_coalescing()
        else:
            self._coalesced = []

    def end_coalescing(self, device: Any) -> Any:
        """Return one work for all calls since ``start_coalescing``."""
        if device.type != "cpu":
            return self.nccl._end_coalescing()
        works, self._coalesced = self._coalesced or [], None
        return GroupWork.of_all(session.engine(), self._set_id, works, self._seconds(None))

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    @functools.cached_property
    def nccl(self) -> Any:
        """The NCCL group of these ranks, which exchanges GPU tensors."""
        if not dist.is_nccl_available():
            raise RuntimeError(
                'The backend "ringdance" needs NCCL for GPU tensors, but this torch was built without NCCL. '
                "Install a build of torch with NCCL."
            )
        nccl_options = filled(dist.ProcessGroupNCCL.Options(), _timeout=self._timeout)
        store = dist.PrefixStore("nccl", self._options.store)
        return dist.ProcessGroupNCCL(store, self.rank(), self.size(), nccl_options)

    def _root(self, name: str, opts: Any) -> int:
        """Return the root of a call, as a rank in this group. Raises ValueError if it does not exist."""
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"{name}: root rank {root} does not exist in this group of {self.size()} ranks.")
        return root

    def _seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)  # Negative in torch's options if not set.
        chosen = timeout if timeout is not None and timeout.total_seconds() > 0 else self._timeout
        return float(chosen.total_seconds())

    def _start(
        self, kind: Collective, arrays: Sequence[Array], targets: Sequence[Array] | None, tensors: Tensors,
        opts: Any, finish: Finish | None, operation: ReduceOp = ReduceOp.SUM, root: int = -1,
        splits: Sequence[Array] | None = None, expected: list[int] | None = None, pattern: str = "",
    ) -> GroupWork:
        """Submit a call.

        Args:
            kind: The collective.
            arrays: Arrays to send.
            targets: Memory for the results, or None to let the engine allocate it.
            tensors: Tensors that the ``Work`` returns as its result.
            opts: torch's options for the call.
            finish: None, or a function that is called once with the results.
            operation: Operation of a reduction.
            root: Root of a broadcast as a global rank, or root of a reduction as a rank in the group.
            splits: Splits of an alltoall.
            expected: For an alltoall, the number of elements expected from each rank.
            pattern: Text that must be the same on all ranks.
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
            # DistributedDataParallel.join() passes the work of a call on a one-element tensor to C++, which
            # calls ``wait`` but holds no reference to the Python object. Keep references to the latest works.
            if (
                len(tensors) == 1 and tensors[0].numel() == 1 and not tensors[0].is_sparse
                and tensors[0].untyped_storage().nbytes() <= _SMALL_BYTES
            ):
                self._recent.append(started)
        return started

    def _exchange(
        self, source: Array, splits: list[int], expected: list[int], outputs: Tensors, opts: Any,
        pattern: str, targets: list[Array] | None = None, finish: Finish | None = None,
    ) -> Any:
        """Send ``splits[j]`` elements of flat ``source`` to rank j, and receive ``expected[j]`` from it."""
        finish = finish or (lambda results: distribute(results[0], outputs))
        rows = [np.array(splits, np.int64)]
        return self._start(
            Collective.ALLTOALL, [source], targets, outputs, opts, finish, splits=rows, expected=expected,
            pattern=pattern,
        )
