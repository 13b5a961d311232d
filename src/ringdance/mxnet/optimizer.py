"""A Gluon trainer and a Module optimizer that average gradients over the ranks."""

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
_numbers = itertools.count()  # The same on all ranks, which create trainers in the same order.


class _Reduction:
    """Averages gradients in place.

    Args:
        name: Name of the exchange, the same on all ranks.
        predivide: Factor by which gradients are divided before they are summed. The sum is multiplied by it.
        groups: Number of groups in which gradients are exchanged. 0 means one group.
        process_set: The participating ranks.
        compression: Compression of the gradients in the exchange.
    """

    def __init__(
        self, name: str, predivide: float, groups: int, process_set: ProcessSet,
        compression: Any = Compression.none,
    ) -> None:
        self.name, self.groups, self.process_set = name, groups, process_set
        self.scales = scales_of(ReduceOp.AVERAGE, predivide)
        self.compression = compression

    def __call__(self, gradients: Sequence[NDArray], names: Sequence[str], suffix: str = "") -> None:
        """Average the gradients of the parameters ``names``. Calls in one step need different suffixes."""
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        calls = []
        parts = np.array_split(np.arange(len(pairs)), min(self.groups, len(pairs)) or 1)
        for number, part in enumerate(indices.tolist() for indices in parts):
            name = f"{self.name}{suffix}" + (f".{number}" if len(parts) > 1 else "")
            labels.note(f"grouped_allreduce.{name}", self.name, "gradients", [names[index] for index in part])
            call = allreduce_call(name, None, Average, *self.scales, self.process_set, True)
            calls.append((call, [pairs[index][0] for index in part]))
        run_in_place(calls)
        for gradient, (small, context) in zip(gradients, pairs, strict=True):
            if small is not gradient:
                gradient[()] = self.compression.decompress(small, context)

    def compare(self, tensors: Sequence[NDArray], names: Sequence[str], suffix: str = "") -> None:
        """Compare parameters across ranks if a comparison is due. See ``training.gradients.weights``."""
        name, number = f"{self.name}{suffix}", set_id(self.process_set)
        with as_mxnet():
            weights.compare_if_due(name, names, _ADVICE, number, lambda: sample_of(tensors))


class DistributedTrainer(Trainer):
    """A ``gluon.Trainer`` that averages the gradients over the ranks in ``step`` and ``allreduce_grads``.

    Each process trains on one device. With ``grad_req="add"``, each call averages the gradients that have
    been accumulated so far.

    Args:
        params: Parameters, as in ``gluon.Trainer``. Must be the same on all ranks.
        optimizer: Name or instance of an optimizer, as in ``gluon.Trainer``. Must be the same on all ranks.
        optimizer_params: Options of the optimizer, as in ``gluon.Trainer``. Must be the same on all ranks.
        compression: ``Compression.fp16`` halves the number of bytes sent for float32 gradients.
        gradient_predivide_factor: Factor by which gradients are divided before they are summed. The result is
            still the average.
        prefix: Name of the exchange. Needed if the ranks do not create their trainers in the same order.
        num_groups: Number of groups in which gradients are exchanged. 0 means one group.
        process_set: The participating ranks. On other ranks, this is a regular trainer.

    Raises:
        ValueError: Parameters are on several devices, an argument has the wrong type, or ``optimizer`` is a
            ``DistributedOptimizer`` with a different process set or predivide factor.
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
                "DistributedTrainer itself averages gradients, so it uses the optimizer that the "
                "DistributedOptimizer wraps. Pass that optimizer to DistributedTrainer.", stacklevel=2,
            )
        super().__init__(params, optimizer, optimizer_params)
        name = f"trainer.{prefix or next(_numbers)}"
        self._reduction = _Reduction(name, gradient_predivide_factor, num_groups, process_set, compression)

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks."""
        trained = self.trained()
        if trained and takes_part(self._reduction.process_set):
            names = [parameter.name for parameter in trained]
            self._reduction([self._only(parameter.list_grad(), parameter) for parameter in trained], names)
            self._reduction.compare([parameter.list_data()[0] for parameter in trained], names)
        session.mark_step()

    @staticmethod
    def _only(arrays: Sequence[NDArray], parameter: Any) -> NDArray:
        if len(arrays) > 1:
            raise ArgumentError(
                f"{parameter.name} is on {len(arrays)} devices. Start one process per device, and give "
                "each process one device, for example mx.gpu(hvd.local_rank())."
            )
        return arrays[0]


def _check_same(given: _Reduction, process_set: ProcessSet, predivide: float) -> None:
    """Raise ArgumentError if a DistributedOptimizer has settings that the trainer would ignore."""
    sets, scales = (process_set, global_process_set), (scales_of(ReduceOp.AVERAGE, predivide), (1.0, 1.0))
    if not any(given.process_set is allowed for allowed in sets) or given.scales not in scales:
        raise ArgumentError(
            "The DistributedOptimizer has a process_set or gradient_predivide_factor that DistributedTrainer "
            "did not receive and would not use. Pass the same values to DistributedTrainer(...)."
        )


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """A ``mx.mod.Module`` optimizer that averages gradients in place before it updates parameters.

    Everything else is delegated to the wrapped optimizer. Use ``kvstore=None``.

    Args:
        optimizer: The optimizer to wrap.
        gradient_predivide_factor: Factor by which gradients are divided before they are summed. The result is
            still the average.
        num_groups: Number of groups in which the gradients of one call are exchanged. 0 means one group.
        process_set: The participating ranks. On other ranks, the optimizer only updates parameters.
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
        if name in ("_optimizer", "_reduction", "_first"):  # Not set yet during unpickling.
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # MXNet's own method would drop attributes.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _reduce(self, index: Any, weight: Any, grad: Any) -> None:
        is_list = isinstance(index, (tuple, list))
        indices = list(index) if is_list else [index]
        if self._first is None:
            self.__dict__["_first"] = indices[0]
        elif self._first == indices[0]:  # Each step starts with this parameter.
            session.mark_step()
        if not takes_part(self._reduction.process_set):
            return
        names = [str(self._optimizer.idx2name.get(key, key)) for key in indices]
        suffix = f".{indices[0]}"
        self._reduction(grad if is_list else [grad], names, suffix)
        self._reduction.compare(weight if is_list else [weight], names, suffix)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients of parameters, then update the parameters."""
        self._reduce(index, weight, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients of parameters, then update them using 32-bit copies of 16-bit parameters."""
        self._reduce(index, weight, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state for a parameter."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return the optimizer's state for a parameter, with a 32-bit copy if the parameter has 16 bits."""
        return self._optimizer.create_state_multi_precision(index, weight)
