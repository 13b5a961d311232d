"""DistributedOptimizer: a torch optimizer whose gradients are reduced over the ranks. Contract 2.1.2.

When ``backward()`` returns, gradients are reduced: ``clip_grad_norm_``, ``GradScaler`` and whatever else
reads gradients are used as in one process. What the ranks exchange when, and what they have to do alike, is
told in ``ringdance.training.optimizer``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringdance import session
from ringdance.core.request import Operation
from ringdance.errors import ArgumentError
from ringdance.torch import operations as ops
from ringdance.torch.adasum import AdasumOptimizer
from ringdance.torch.compression import Compression
from ringdance.torch.gradients import Gradients, Hooks
from ringdance.training.optimizer import GradientExchange
from ringdance.training.options import check_groups, scales_of, wants_overlap
from ringdance.training.process_sets import ProcessSet, global_process_set, set_id
from ringdance.training.verbs import pick_operation

__all__ = ["DistributedOptimizer"]

Closure = Callable[[], Any]


class _Distributed:
    """What is put in front of the optimizer's own class; state lives in the shared ``__dict__``."""

    _exchange: GradientExchange | None  # None: nothing to exchange, one rank or not a member
    _hooks: Hooks | None
    _passes: int
    _process_set: ProcessSet
    _skip: bool
    _by_hand: bool  # synchronize() was called since the last step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange after this many backward passes from now on; between steps only."""
        if passes <= 0:
            raise ArgumentError(f"backward_passes_per_step must be at least 1, got {passes}.")
        self._passes = passes
        if self._exchange is not None:
            self._exchange.passes = passes
            self._exchange.reset()

    def synchronize(self) -> None:
        """Make sure that gradients are reduced; needed only before backward_passes_per_step is reached."""
        self._settle()
        self._by_hand = True

    def _settle(self) -> None:
        exchange = self._exchange
        if exchange is None or self._hooks is None:
            return
        late = self._hooks.late()
        for index in late:
            exchange.computed(index)
        if late:
            exchange.state.passes += 1
        exchange.settle()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, ``step()`` does not look whether gradients are reduced: ``synchronize()`` was called."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Closure | None = None) -> Any:
        """Make a step with reduced gradients; those that ``closure`` computes are reduced before use.

        For LBFGS the closure's loss is averaged over the ranks, so that all search along the same line.
        """
        exchange = self._exchange
        self._opt_called = True  # what learning rate schedulers look at
        if self._by_hand and not self._skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                "harmless here, the gradients are not reduced again; backward() has reduced them already.",
                stacklevel=2,
            )
        self._by_hand = False
        if exchange is None:
            return super().step(closure)  # type: ignore[misc]
        if closure is None:
            if not self._skip:
                self._settle()
            result = super().step()  # type: ignore[misc]
        else:
            result = super().step(self._reducing(closure, exchange))  # type: ignore[misc]
        exchange.step_done()
        return result

    def _reducing(self, closure: Closure, exchange: GradientExchange) -> Closure:
        average_loss = isinstance(self, torch.optim.LBFGS)

        def reducing() -> Any:
            if exchange.settled:
                exchange.state.reduced = bytearray(len(exchange.names))
            loss = closure()
            self._settle()
            if average_loss:
                value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
                return ops.allreduce(
                    value, name=f"{exchange.name}.loss", op=ops.Average, process_set=self._process_set
                )
            return loss

        return reducing

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, with the arguments of the optimizer's own ``zero_grad``."""
        if self._exchange is not None:
            self._exchange.reset()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load state as the optimizer does; what was computed so far is forgotten."""
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._exchange is not None:
            self._exchange.reset()


def named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) for the optimizer's parameters, in an order that is the same on all ranks.

    Raises:
        ArgumentError: not pairs, a name twice, a parameter of the optimizer without a name.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(groups) for j, parameter in enumerate(group)
        ]
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ArgumentError("named_parameters must be (name, parameter) pairs: model.named_parameters().")
    names = [name for name, _ in pairs]
    doubled = sorted(name for name, times in Counter(names).items() if times > 1)
    if doubled:
        raise ArgumentError(f"named_parameters: names must be unique; more than once: {', '.join(doubled)}.")
    given = {id(parameter) for _, parameter in pairs}
    mine = {id(parameter): parameter for group in groups for parameter in group}
    nameless = [tuple(parameter.shape) for key, parameter in mine.items() if key not in given]
    if nameless:
        raise ArgumentError(
            f"named_parameters lacks {len(nameless)} of the optimizer's parameters, the first with shape "
            f"{nameless[0]}: pass all of model.named_parameters()."
        )
    seen: set[int] = set()
    found = []
    for name, parameter in pairs:
        if id(parameter) in mine and id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((name, parameter))
    return found


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = ops.Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set, *,
    reduce_in_backward: bool = True,
) -> Any:
    """Return an optimizer of the same kind whose gradients are reduced over the ranks.

    It shares parameters, options and accumulated state with the one given, and is an instance of a
    subclass of its class. All ranks of the set call this, in the same order if for several optimizers.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``; fixes names and order. Recommended.
        compression: ``Compression.fp16`` or ``.bf16`` halve the bytes of float32 gradients.
        backward_passes_per_step: gradients of so many passes are summed locally before they are exchanged.
        op: Average, Sum or Adasum (then the change of the weights is combined, not the gradient).
        gradient_predivide_factor: with Average, divides before and multiplies after the sum.
        num_groups: old form of ``groups``.
        groups: a number of groups, or lists of parameters, that are exchanged together.
        sparse_as_dense: reduce sparse gradients as dense ones instead of gathering them.
        process_set: the ranks that take part; on others the optimizer is local.
        reduce_in_backward: False exchanges in ``step()`` only, once for each step.

    Raises:
        ArgumentError: an argument is wrong.
    """
    engine = session.engine()
    operation = pick_operation(None, op)
    pairs = named(optimizer, named_parameters)
    if backward_passes_per_step <= 0:
        raise ArgumentError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}.")
    if num_groups:
        warnings.warn("num_groups is old: say groups=<number>.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    parameters = [parameter for _, parameter in pairs]
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
    if isinstance(groups, (list, tuple)) and any(
        isinstance(group, Tensor) or not all(isinstance(one, Tensor) for one in group) for group in groups
    ):
        raise ArgumentError("groups must be a positive number or a list of lists of parameters.")
    if groups is not None and (isinstance(groups, bool) or (isinstance(groups, int) and groups <= 0)):
        raise ArgumentError(f"groups={groups!r}: give a positive number or a list of lists of parameters.")
    index_groups = check_groups(groups, trained, lambda one: place.get(id(one)))
    scales_of(operation, gradient_predivide_factor)  # raises for arguments that do not go together
    size = len(engine.members(set_id(process_set)))
    member = bool(process_set.included())
    if operation is Operation.ADASUM and size > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("The Adasum optimizer works on all ranks only, not on a process set.")
        return _subclassed(optimizer, AdasumOptimizer, _names=[name for name, _ in pairs],
                           _parameters=parameters, _compression=compression, _passes=backward_passes_per_step)
    result = _subclassed(
        optimizer, _Distributed, _exchange=None, _hooks=None, _passes=backward_passes_per_step,
        _process_set=process_set, _skip=False, _by_hand=False,
    )
    if member and size > 1:
        exchange = GradientExchange(
            Gradients(parameters, compression, sparse_as_dense), [name for name, _ in pairs],
            operation=operation, passes=backward_passes_per_step,
            predivide=gradient_predivide_factor, groups=index_groups,
            set_id=set_id(process_set), early=reduce_in_backward,
            overlap=wants_overlap(engine, torch.get_num_threads()),
        )
        result._exchange = exchange
        result._hooks = Hooks(parameters, exchange.computed, exchange.pass_done)
    return result


def _subclassed(optimizer: torch.optim.Optimizer, front: type, **state: Any) -> Any:
    """Return an object of a new subclass that shares everything with ``optimizer``.

    The class has the optimizer's name and this module, by which scripts know it.
    """
    base = type(optimizer)
    if issubclass(base, (_Distributed, AdasumOptimizer)):
        raise ArgumentError("This optimizer is a DistributedOptimizer already.")
    # A learning rate scheduler made before has put its wrapper of the plain step there: it would hide ours.
    wrapper = optimizer.__dict__.pop("step", None)
    result: Any = object.__new__(type(base.__name__, (front, base), {"__module__": __name__}))
    result.__dict__ = optimizer.__dict__
    result.__dict__.update(state)
    if wrapper is not None:

        def step(*args: Any, **kwargs: Any) -> Any:
            return type(result).step(result, *args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what the scheduler looks for
        result.step = step
    return result
