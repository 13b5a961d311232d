"""DistributedOptimizer: a torch optimizer whose gradients are reduced over the ranks.

Gradients are reduced when ``backward()`` returns, so ``clip_grad_norm_``, ``GradScaler`` and anything else
that reads gradients work as in a single process. ``ringdance.training.gradients.exchange`` describes what the
ranks exchange, when they exchange it, and what all ranks must do in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringdance.core.request import ReduceOp
from ringdance.errors import ArgumentError
from ringdance.torch import _private
from ringdance.torch import operations as ops
from ringdance.torch._private import compiler_disable
from ringdance.torch.adasum import AdasumOptimizer
from ringdance.torch.device.communicators import nccl_built
from ringdance.torch.gradients import Gradients
from ringdance.torch.hooks import Hooks, release
from ringdance.torch.memory import Compression
from ringdance.torch.wrapped import (
    OptimizerOptions,
    Wrapped,
    check_optimizer,
    check_whole,
    names_of,
    warn_of_local_batch_norm,
    wrap,
)
from ringdance.training import session
from ringdance.training.checks import pick_operation
from ringdance.training.exports import Average
from ringdance.training.gradients.cores import wants_overlap
from ringdance.training.gradients.exchange import GradientExchange
from ringdance.training.gradients.options import check_groups
from ringdance.training.process_sets import ProcessSet, bind, bound_id, global_process_set, takes_part

Closure = Callable[[], Any]

_log = logging.getLogger("ringdance")


class _Distributed(Wrapped):
    """Mixin for distributed optimizers. Precedes the optimizer's own class in the list of base classes."""

    # Defaults are class attributes, so that a copied optimizer starts with them.
    _skip = False
    _by_hand = False  # True if synchronize() was called after the last step.

    def _connect(self) -> None:
        """Create the exchange and install hooks on the parameters.

        All ranks must connect their optimizers in the same order.
        """
        options, engine = self._options, session.engine()
        bind([options.process_set])  # A copy may come from another job.
        self._connected = True
        if not takes_part(options.process_set):
            release(options.parameters)
            return
        check_whole(options.names, options.parameters)
        source = Gradients(options.parameters, options.compression, options.sparse_as_dense)
        on_gpu = source.on_device and not options.parameters[0].is_cpu  # The CPU cores are then idle.
        exchange = self._exchange = GradientExchange(
            source, options.names, operation=options.operation, passes=options.passes,
            predivide=options.predivide, groups=options.groups, process_set=options.process_set,
            early=options.early, overlap=wants_overlap(engine, 0 if on_gpu else torch.get_num_threads()),
        )
        self._hooks = Hooks(options.parameters, exchange)
        release(options.parameters, self._hooks)

    def _prepare(self) -> None:
        """Connect a copied optimizer when it is first used in a job, and find newly added parameters.

        Raises:
            ArgumentError: Another distributed optimizer has since been created for some of the parameters.
        """
        if not self._connected and session.is_initialized():
            self._connect()
        self._check_not_replaced()
        if self._hooks is not None:
            self._add_new()

    def _check_not_replaced(self) -> None:
        if self._hooks is not None and not self._hooks.close.alive:
            raise ArgumentError(
                f"The DistributedOptimizer for {self._options.names[0]} and others no longer reduces "
                "gradients, because another DistributedOptimizer was created later for some of its "
                "parameters, or because it was closed. Use the later optimizer, or call "
                "DistributedOptimizer() again to take the parameters back. Optimizers that are used "
                "alternately must not share parameters."
            )

    def close(self) -> None:
        """Stop reducing gradients. All ranks must call this at the same point.

        An optimizer that is no longer referenced is closed automatically. If it is part of a reference cycle,
        the garbage collector closes it, but at different times on different ranks.
        """
        if self._hooks is not None and self._hooks.close.alive:
            release(self._options.parameters)

    @compiler_disable
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters (see ``Wrapped``). Raises ArgumentError if another optimizer replaced this one."""
        self._check_not_replaced()
        super().add_param_group(param_group)

    def _add_new(self) -> list[int]:
        new = super()._add_new()
        if new and self._exchange is not None and self._hooks is not None:
            names = self._options.names[new[0] :]
            check_whole(names, self._options.parameters[new[0] :])
            self._hooks.watch()
            self._exchange.extend(names)
        return new

    @compiler_disable
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per gradient exchange. Call this only between steps."""
        super().set_backward_passes_per_step(passes)
        self._prepare()
        if self._exchange is not None:
            self._exchange.passes = passes
            self._exchange.reset()

    @compiler_disable
    def synchronize(self) -> None:
        """Reduce gradients now if necessary, even after fewer than ``backward_passes_per_step`` passes."""
        self._prepare()
        self._finish_exchange()
        self._by_hand = True

    def _finish_exchange(self) -> None:
        if self._exchange is not None and self._hooks is not None:
            self._hooks.watch()
            self._exchange.finish_exchange()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within the block, ``step()`` does not reduce gradients again. Use it after ``synchronize()``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    @compiler_disable
    def step(self, closure: Closure | None = None) -> Any:
        """Take a step with reduced gradients. Gradients computed by ``closure`` are reduced before use.

        For LBFGS, the closure's loss is averaged over the ranks, so that all ranks' line searches are
        identical.
        """
        self._prepare()
        if (exchange := self._exchange) is not None:
            exchange.idle = False
        _private.note_step(self)
        if self._by_hand and not self._skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). "
                "This is harmless, because backward() has already reduced the gradients, and they are not "
                "reduced again.",
                stacklevel=2,
            )
        self._by_hand = False
        if exchange is None:
            result = super().step(closure)  # type: ignore[misc]
        elif closure is None:
            if not self._skip:
                self._finish_exchange()
            result = super().step()  # type: ignore[misc]
        else:
            result = super().step(self._reducing(closure, exchange))  # type: ignore[misc]
        if exchange is not None:
            exchange.on_step_end()
        session.mark_step()
        return result

    _private.hooks_run_inside(step)

    def _reducing(self, closure: Closure, exchange: GradientExchange) -> Closure:
        average_loss = isinstance(self, torch.optim.LBFGS)

        def reducing() -> Any:
            if exchange.finished:
                exchange.begin()
            loss = closure()
            self._finish_exchange()
            if average_loss:
                value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
                return ops.allreduce(
                    value, name=f"{exchange.name}.loss", op=Average, process_set=self._options.process_set
                )
            return loss

        return reducing

    @compiler_disable
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients. Takes the same arguments as the optimizer's own ``zero_grad``."""
        self._prepare()
        if self._exchange is not None:
            self._exchange.reset()
            self._exchange.source.forget()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    @compiler_disable
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load state as the wrapped optimizer does. Gradients computed so far are discarded."""
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        if self._exchange is not None:
            self._exchange.reset()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set, *,
    reduce_in_backward: bool = True,
) -> Any:
    """Return an optimizer of the same kind whose gradients are reduced over the ranks.

    The result shares parameters, options and accumulated state with ``optimizer``, and its class is a
    subclass of ``optimizer``'s class. All ranks in the set must call this. If they create several optimizers,
    they must create them in the same order. Earlier distributed optimizers with any of these parameters are
    replaced immediately.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``. Determines parameter names and order. Recommended.
        compression: ``Compression.fp16`` or ``.bf16`` halves the amount of data sent for float32 gradients.
        backward_passes_per_step: Number of backward passes whose gradients are summed locally before each
            exchange.
        op: Average, Sum or Adasum. Adasum combines the weight changes instead of the gradients.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and the sum is
            multiplied by it (Average only).
        num_groups: Deprecated. Use ``groups``.
        groups: Number of groups, or lists of parameters to exchange together.
        sparse_as_dense: If True, reduce sparse gradients as dense ones instead of gathering them.
        process_set: The participating ranks. On other ranks the optimizer is local.
        reduce_in_backward: If False, exchange only in ``step()``, once per step.

    Raises:
        ArgumentError: An argument is invalid, or the job has several ranks and a parameter is sharded across
            processes.
    """
    check_optimizer(optimizer)
    number = bound_id(process_set)
    warn_of_local_batch_norm(named_parameters)
    names, parameters, by_id = names_of(optimizer, named_parameters)
    options = OptimizerOptions(
        names, parameters, by_id, pick_operation(None, op), compression, process_set,
        backward_passes_per_step, gradient_predivide_factor, sparse_as_dense, reduce_in_backward,
        _index_groups(num_groups, groups, parameters),
    )
    if options.operation is ReduceOp.ADASUM and len(session.engine().members(number)) > 1:
        _check_adasum(process_set, parameters)
        release(parameters)
        return wrap(optimizer, AdasumOptimizer, options)
    if takes_part(process_set):
        check_whole(names, parameters)  # Must come before wrap(), which changes the optimizer.
    result = wrap(optimizer, _Distributed, options)
    result._connect()
    if result._exchange is not None:
        end = weakref.finalize(result, _warn_of_idle, result._exchange, weakref.ref(optimizer))
        end.atexit = False
    return result


def _check_adasum(process_set: ProcessSet, parameters: list[Tensor]) -> None:
    """Raise an error for Adasum on a subset of the ranks. Warn if the results differ from Horovod's."""
    if process_set is not global_process_set:
        raise NotImplementedError("An optimizer with op=Adasum does not support process_set. Omit it.")
    if nccl_built() and any(parameter.is_cuda for parameter in parameters):
        warnings.warn(
            "Adasum combines the weight changes of all ranks. Horovod with NCCL combines the averages of the "
            "hosts instead. Scale the learning rate as for Horovod without NCCL, that is, not by "
            "local_size().", stacklevel=3,
        )  # fmt: skip


def _warn_of_idle(exchange: GradientExchange, wrapped: weakref.ref[Any]) -> None:
    """Warn if a script does not use the optimizer that ``DistributedOptimizer`` returned."""
    if exchange.idle and wrapped() is not None and not exchange.engine.closed:
        _log.warning(
            "ringdance: the DistributedOptimizer for %s and others was dropped before its first step, so "
            "gradients are no longer reduced. Keep the returned optimizer, and call its step().",
            exchange.names[0],
        )


def _index_groups(num_groups: int, groups: Any, parameters: list[Tensor]) -> list[tuple[int, ...]]:
    """Convert ``groups`` to parameter indices. Raises ArgumentError if it has the wrong type."""
    if num_groups:
        warnings.warn("num_groups is deprecated. Use groups=<number>.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    listed = groups if isinstance(groups, (list, tuple)) else ()
    if groups == 0 or any(
        isinstance(group, Tensor) or not all(isinstance(item, Tensor) for item in group) for group in listed
    ):
        raise ArgumentError("groups is invalid. Pass a positive number or a list of lists of parameters.")
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    trained = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
    return check_groups(groups, trained, lambda parameter: index.get(id(parameter)))
