"""Base class of the mixins for distributed optimizers, and the optimizers' options."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.torch import _private
from ringdance.torch._private import compiler_disable
from ringdance.torch.hooks import Hooks, release
from ringdance.training import session
from ringdance.training.gradients.exchange import GradientExchange
from ringdance.training.gradients.options import check_passes, scales_of
from ringdance.training.process_sets import ProcessSet


@dataclass
class OptimizerOptions:
    """Arguments of a distributed optimizer. Copies of the optimizer keep them.

    Attributes:
        names: Parameter names, in the same order on all ranks.
        parameters: The optimizer's parameters, in the order of ``names``.
        given: (name, parameter) pairs by parameter id, including parameters not yet in the optimizer.
        operation, compression, process_set, passes, predivide, sparse_as_dense, early, groups: Arguments of
            ``DistributedOptimizer``. Groups contain parameter indices.
        seen: Ids of the parameters in the optimizer's groups at the last search for new parameters.
    """

    names: list[str]
    parameters: list[Tensor]
    given: dict[int, tuple[str, Tensor]]
    operation: ReduceOp
    compression: Any
    process_set: ProcessSet
    passes: int
    predivide: float
    sparse_as_dense: bool
    early: bool
    groups: Sequence[tuple[int, ...]] = ()
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise ArgumentError if arguments are invalid or incompatible."""
        check_passes(self.passes)
        scales_of(self.operation, self.predivide)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "given": {}}  # ``given`` refers to parameters outside the copy.


class Wrapped:
    """Mixin that precedes the optimizer's own class in the list of base classes.

    An instance and the optimizer that it wraps share one ``__dict__``.
    A copy (``copy.deepcopy`` or ``pickle``) is a distributed optimizer with its own parameters. It joins the
    job at its first ``zero_grad()`` or ``step()``. Outside a job, it is a plain optimizer.
    """

    # Not in __dict__, because the wrapped optimizer shares it and must not keep the exchange alive.
    __slots__ = ("__dict__", "_connected", "_exchange", "_hooks")

    _options: OptimizerOptions
    _connected: bool  # True once connected to the job.
    _exchange: GradientExchange | None  # None if there is only one rank or this rank is not a member.
    _hooks: Hooks | None

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter. Scripts written for Horovod use this attribute."""
        return dict(zip(self._options.parameters, self._options.names, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**own, "_options": self._options}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, type(self).__bases__, self.__getstate__()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per gradient exchange. Has no effect for Adasum."""
        check_passes(passes)
        self._options.passes = passes

    @compiler_disable
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters whose gradients are reduced from now on.

        All ranks must call this before the same step. Names come from ``named_parameters``. Parameters that
        are not in it get a name that consists of the group index and the parameter index.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        self._add_new()

    def _add_new(self) -> list[int]:
        """Find new parameters in the parameter groups, including any added through the wrapped optimizer.

        Returns the indices of the new parameters.
        """
        options, groups = self._options, self.param_groups  # type: ignore[attr-defined]
        seen = [id(parameter) for group in groups for parameter in group["params"]]
        if seen == options.seen:
            return []
        options.seen = seen
        first = len(options.parameters)
        known = {id(parameter) for parameter in options.parameters}
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    pair = options.given.get(id(parameter))
                    options.names.append(pair[0] if pair else _number_name(i, j))
                    options.parameters.append(parameter)
        release(options.parameters[first:], self._hooks)
        return list(range(first, len(options.parameters)))


def wrap(optimizer: torch.optim.Optimizer, front: type[Wrapped], options: OptimizerOptions) -> Any:
    """Return an instance of a new subclass of the optimizer's class. It shares all state with ``optimizer``.

    The subclass takes its name from the optimizer's class and its module from ``front``, because scripts
    check both.
    """
    # An existing learning rate scheduler has stored a wrapper around the original step in the instance, where
    # it would hide our step.
    wrapper = optimizer.__dict__.pop("step", None)
    result = _blank(front, type(optimizer))
    result.__dict__ = optimizer.__dict__
    result._options = options
    if wrapper is not None:
        references = weakref.ref(result), weakref.ref(optimizer)  # Weak, as both optimizers hold ``step``.

        def step(*args: Any, **kwargs: Any) -> Any:
            target: Any = references[0]() or references[1]()
            return type(target).step(target, *args, **kwargs)

        _private.counts_steps(step)
        result.step = step
    return result


@lru_cache(maxsize=256)
def _class_of(front: type, base: type) -> type:
    return type(base.__name__, (front, base), {"__module__": "ringdance.torch.optimizer"})


def _blank(front: type, base: type) -> Any:
    """Return an uninitialized optimizer whose class is a subclass of ``front`` and ``base``."""
    result: Any = object.__new__(_class_of(front, base))
    result._connected, result._exchange, result._hooks = False, None, None
    return result


def check_optimizer(optimizer: Any) -> None:
    """Raise ArgumentError unless this is a plain ``torch.optim.Optimizer``."""
    if isinstance(optimizer, Wrapped):
        raise ArgumentError("This optimizer is already a DistributedOptimizer. Wrap an optimizer only once.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "DistributedOptimizer needs an optimizer, such as torch.optim.SGD(model.parameters(), lr=0.1), "
            f"and model.named_parameters() as its second argument, but got {type(optimizer).__name__}."
        )


def check_whole(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Raise ArgumentError if a parameter is sharded across processes by torch.distributed."""
    for name, parameter in zip(names, parameters, strict=True):
        how = _private.divided_by(parameter)
        if how is not None:
            raise ArgumentError(
                f"Parameter {name} is sharded across processes by {how}, which also reduces its gradients. "
                "Use the plain optimizer with torch.distributed only, or use DistributedOptimizer with a "
                "model that is complete on each rank (without FSDP, fully_shard or parallelize_module)."
            )


def warn_of_local_batch_norm(named_parameters: Any) -> None:
    """Warn if there are several ranks and the module of ``named_parameters`` uses torch's SyncBatchNorm."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed or session.engine().size == 1 or not inspect.isgenerator(named_parameters):
        return
    module = inspect.getgeneratorlocals(named_parameters).get("self")
    if isinstance(module, torch.nn.Module) and any(
        isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules()
    ):
        warnings.warn(
            "The model contains torch.nn.SyncBatchNorm, which normalizes each rank's batch separately unless "
            "torch.distributed is initialized. Before you create the optimizer, convert the model: "
            "model = hvd.SyncBatchNorm.convert_sync_batchnorm(model).",
            stacklevel=3,
        )


def _number_name(group: int, index: int) -> str:
    return f"allreduce.noname.{group}.{index}"


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> tuple[list[str], list[Tensor], dict[int, tuple[str, Tensor]]]:
    """Return the names and parameters of the optimizer, in the same order on all ranks.

    The third result maps parameter ids to (name, parameter) pairs, for all named parameters.

    Raises:
        ArgumentError: An entry is not a pair, a name appears twice, or a parameter of the optimizer has no
            name.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if named_parameters is None:
        numbered = [_number_name(i, j) for i, group in enumerate(groups) for j in range(len(group))]
        return numbered, [parameter for group in groups for parameter in group], {}
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    wrong = [pair for pair in pairs if not _is_pair(pair)]
    if wrong:
        raise ArgumentError(
            "named_parameters must contain (name, parameter) pairs, like model.named_parameters(), but got "
            f"{type(wrong[0]).__name__}."
        )
    names = [name for name, _ in pairs]
    doubled = sorted(name for name, times in Counter(names).items() if times > 1)
    if doubled:
        raise ArgumentError(
            f"named_parameters contains duplicate names ({', '.join(doubled)}). Give each parameter a unique "
            "name."
        )
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in pairs:
        by_id.setdefault(id(parameter), (name, parameter))
    own = {id(parameter): parameter for group in groups for parameter in group}
    nameless = [tuple(parameter.shape) for key, parameter in own.items() if key not in by_id]
    if nameless:
        raise ArgumentError(
            f"named_parameters lacks {len(nameless)} of the optimizer's parameters. The first of these has "
            f"shape {nameless[0]}. Pass all of model.named_parameters()."
        )
    trained = [pair for key, pair in by_id.items() if key in own]
    return [name for name, _ in trained], [parameter for _, parameter in trained], by_id


def _is_pair(one: Any) -> bool:
    return (
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], Tensor)
    )
