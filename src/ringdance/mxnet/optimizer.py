"""Gluon's trainer and the optimizer of a Module, with gradients reduced over the ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ringdance.core import labels
from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.mxnet._private import Trainer
from ringdance.mxnet.errors import as_mxnet
from ringdance.mxnet.exchange import run_in_place
from ringdance.mxnet.memory import Compression, NDArray, sample_of
from ringdance.training import session
from ringdance.training.collectives import allreduce_call
from ringdance.training.exports import Average
from ringdance.training.gradients import weights
from ringdance.training.gradients.options import scales_of
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id, takes_part

_ADVICE = "hvd.broadcast_parameters(net.collect_params(), root_rank=0)"
_numbers = itertools.count()  # all ranks make their trainers in one order


class _Reduction:
    """How gradients are averaged in place.

    Args:
        name: of the exchange, the same on all ranks.
        predivide: divides before and multiplies after the sum.
        groups: in how many lists gradients are exchanged; 0: in one.
        process_set: the ranks that take part.
        compression: for the exchange.
    """

    def __init__(
        self, name: str, predivide: float, groups: int, process_set: ProcessSet,
        compression: Any = Compression.none,
    ) -> None:
        self.name, self.groups, self.process_set = name, groups, process_set
        self.scales = scales_of(ReduceOp.AVERAGE, predivide)
        self.compression = compression

    def __call__(self, gradients: Sequence[NDArray], names: Sequence[str], suffix: str = "") -> None:
        """Average gradients; ``names``: of their parameters; ``suffix``: what is in a step once."""
        pairs = [self.compression.compress(one) for one in gradients]
        calls = []
        parts = np.array_split(np.arange(len(pairs)), min(self.groups, len(pairs)) or 1)
        for number, part in enumerate(one.tolist() for one in parts):
            name = f"{self.name}{suffix}" + (f".{number}" if len(parts) > 1 else "")
            labels.note(f"grouped_allreduce.{name}", self.name, "gradients", [names[one] for one in part])
            call = allreduce_call(name, None, Average, *self.scales, self.process_set, True)
            calls.append((call, [pairs[one][0] for one in part]))
        run_in_place(calls)
        for gradient, (small, context) in zip(gradients, pairs, strict=True):
            if small is not gradient:
                gradient[()] = self.compression.decompress(small, context)

    def compare(self, tensors: Sequence[NDArray], names: Sequence[str], suffix: str = "") -> None:
        """Compare parameters over the ranks if that is due: see ``weights``."""
        name, number = f"{self.name}{suffix}", set_id(self.process_set)
        with as_mxnet():
            weights.compare_if_due(name, names, _ADVICE, number, lambda: sample_of(tensors))


class DistributedTrainer(Trainer):
    """A ``gluon.Trainer`` that averages the gradients over the ranks in ``step`` and ``allreduce_grads``.

    Each process trains on one device. Gradients that ``grad_req="add"`` sums up over several passes are
    averaged each time.

    Args:
        params: as of ``gluon.Trainer``, equal on all ranks.
        optimizer: likewise; a name or an optimizer.
        optimizer_params: likewise.
        compression: ``Compression.fp16`` halves the bytes of float32 gradients.
        gradient_predivide_factor: divides gradients before the sum; the result is the average all the same.
        prefix: name of the exchange, where not all ranks make their trainers in one order.
        num_groups: gradients are exchanged in so many lists; 0: in one.
        process_set: the ranks that take part; on others it is a plain trainer.

    Raises:
        ValueError: parameters on several devices, an argument of the wrong kind, or a
            ``DistributedOptimizer`` with another process set or predivide factor.
    """

    def __init__(
        self, params: Any, optimizer: Any, optimizer_params: Any = None, compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0, prefix: str | None = None, num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            _check_same(optimizer._reduction, process_set, gradient_predivide_factor)
            optimizer = optimizer._optimizer
            warnings.warn(
                "DistributedTrainer averages gradients by itself: it takes the optimizer out of the "
                "DistributedOptimizer.", stacklevel=2,
            )
        super().__init__(params, optimizer, optimizer_params)
        name = f"trainer.{prefix or next(_numbers)}"
        self._reduction = _Reduction(name, gradient_predivide_factor, num_groups, process_set, compression)

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks."""
        trained = self.trained()
        if trained and takes_part(self._reduction.process_set):
            names = [one.name for one in trained]
            self._reduction([self._only(one.list_grad(), one) for one in trained], names)
            self._reduction.compare([one.list_data()[0] for one in trained], names)
        session.mark_step()

    @staticmethod
    def _only(arrays: Sequence[NDArray], parameter: Any) -> NDArray:
        if len(arrays) > 1:
            raise ArgumentError(
                f"{parameter.name} is on {len(arrays)} devices: start one process for each device, and give "
                "it that one, as mx.gpu(hvd.local_rank())."
            )
        return arrays[0]


def _check_same(given: _Reduction, process_set: ProcessSet, predivide: float) -> None:
    """Refuse a DistributedOptimizer of which a trainer would lose a setting."""
    sets, scales = (process_set, global_process_set), (scales_of(ReduceOp.AVERAGE, predivide), (1.0, 1.0))
    if not any(given.process_set is one for one in sets) or given.scales not in scales:
        raise ArgumentError(
            "The DistributedOptimizer has a process_set or gradient_predivide_factor that this "
            "DistributedTrainer would not use: give the same to DistributedTrainer(...)."
        )


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer of ``mx.mod.Module`` that averages gradients in place before it updates parameters.

    Everything else is the given optimizer's. Use ``kvstore=None``.

    Args:
        optimizer: the optimizer.
        gradient_predivide_factor: divides gradients before the sum; the result is the average all the same.
        num_groups: gradients given together are exchanged in so many lists; 0: in one.
        process_set: the ranks that take part; on others it only updates.
    """

    def __init__(
        self, optimizer: Any, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        reduction = _Reduction(
            f"optimizer.{next(_numbers)}", gradient_predivide_factor, num_groups, process_set
        )
        self.__dict__.update(_optimizer=optimizer, _reduction=reduction, _first=None)

    def __getattr__(self, name: str) -> Any:
        if name in ("_optimizer", "_reduction", "_first"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # MXNet's own leaves out what the given optimizer has

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _reduce(self, index: Any, weight: Any, grad: Any) -> None:
        listed = isinstance(index, (tuple, list))
        indices = list(index) if listed else [index]
        if self._first is None:
            self.__dict__["_first"] = indices[0]
        elif self._first == indices[0]:  # which begins each step
            session.mark_step()
        if not takes_part(self._reduction.process_set):
            return
        names = [str(self._optimizer.idx2name.get(one, one)) for one in indices]
        suffix = f".{indices[0]}"
        self._reduction(grad if listed else [grad], names, suffix)
        self._reduction.compare(weight if listed else [weight], names, suffix)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients of parameters and update these."""
        self._reduce(index, weight, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients of parameters and update these, with 32-bit copies of 16-bit ones."""
        self._reduce(index, weight, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state of a parameter."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state of a parameter, with a 32-bit copy of a 16-bit one."""
        return self._optimizer.create_state_multi_precision(index, weight)
