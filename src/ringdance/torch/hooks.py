"""Hooks that run when a backward pass accumulates a gradient, and when the pass ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ringdance.errors import ArgumentError
from ringdance.torch import _private
from ringdance.torch._private import compiler_disable
from ringdance.training.gradients.exchange import GradientExchange

_all: weakref.WeakValueDictionary[int, Hooks] = weakref.WeakValueDictionary()


def release(parameters: Sequence[Tensor], but: Hooks | None = None) -> None:
    """Close the hooks of all optimizers that contain any of the ``parameters``, except for ``but``.

    All ranks must call this at the same point. The garbage collector would close the hooks at different times
    on different ranks.
    """
    taken = set(map(id, parameters))
    for reference in _all.valuerefs():
        hooks = reference()
        if hooks is not None and hooks is not but and not taken.isdisjoint(map(id, hooks.parameters)):
            if hooks.close.alive:
                hooks.exchange.abandon()
                hooks.exchange.idle = False
            hooks.close()


def _close(handles: dict[int, Any], exchange: GradientExchange) -> None:
    for handle in handles.values():
        handle.remove()
    exchange.close()


class Hooks:
    """Notifies an exchange of each gradient that a backward pass accumulates, and of the end of the pass.

    Parameters hold only weak references to this object. It lives until its optimizer is freed or ``close`` is
    called (see ``release``).

    Note [Backward passes within others]
    Checkpointing with ``use_reentrant=True`` runs a backward pass inside a node of another pass, at any
    depth. Some models use all parameters only in inner passes. An inner pass counts as part of the outermost
    pass. torch runs a callback at the end of the pass that the thread is running when the callback is queued,
    so the callback cannot be queued before the thread is back in the outermost pass. Therefore, the inner
    pass adds a hook to a node that the outermost pass runs after the node that contains the inner pass. If a
    pass raises an error before it reaches that node, the hook remains, but does nothing in later passes.

    Args:
        parameters: Parameters on which to install hooks if they require gradients. The list may grow. See
            ``watch``.
        exchange: Exchange for their gradients. An ``early`` exchange must be notified when a pass ends. If
            torch cannot report the end, the first gradient raises an error. For other exchanges, each
            gradient then counts as a pass.
    """
    def __init__(self, parameters: Sequence[Tensor], exchange: GradientExchange) -> None:
        self.parameters = parameters
        self.exchange = exchange
        self._tasks: dict[int, int] = {}  # Step in which each unfinished pass began, by task id.
        self._handles: dict[int, Any] = {}
        self.close = weakref.finalize(self, _close, self._handles, exchange)
        self.close.atexit = False
        _all[id(self)] = self
        self.watch()

    def watch(self) -> None:
        """Install hooks on parameters that are new in the list, or that now require a gradient."""
        if len(self._handles) < len(self.parameters):
            for index, parameter in enumerate(self.parameters):
                if index not in self._handles and parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles[index] = register(compiler_disable(self._hook(index)))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        reference, tasks, graph_task = weakref.ref(self), self._tasks, _private.graph_task

        def hook(_: Tensor) -> None:
            if (hooks := reference()) is not None:
                hooks.exchange.on_gradient(index)
                if graph_task() not in tasks:
                    hooks._wait_for_end()

        return hook

    def _wait_for_end(self) -> None:
        """Arrange for ``_end`` to run after the outermost pass. See Note [Backward passes within others]."""
        if not _private.has_end_callback():
            if self.exchange.early:
                raise ArgumentError(
                    "torch cannot report the end of this backward pass, for example because compiled "
                    "autograd is in use. Set torch._dynamo.config.compiled_autograd = False, or pass "
                    "reduce_in_backward=False to DistributedOptimizer, which then reduces gradients in "
                    "step(), after any clipping."
                )
            self.exchange.on_backward_end()
            return
        task = _private.graph_task()
        self._tasks[task] = self.exchange.step
        node = _private.outermost_function_node()
        if node is None:
            _private.queue_callback(self._end)
            return
        following = next((follower for follower, _ in node.next_functions if follower is not None), None)
        if following is None:
            return

        def in_outermost(_: Any) -> None:
            handle.remove()
            self._tasks.pop(task, None)
            outer = _private.graph_task()
            # Task ids increase. If the current pass began later, the hook was left behind by a failed pass.
            if 0 <= outer < task and outer not in self._tasks:
                self._wait_for_end()

        handle = following.register_prehook(compiler_disable(in_outermost))

    @compiler_disable
    def _end(self) -> None:
        task = _private.graph_task()
        if task not in self._tasks:  # Another thread queued this callback for the same pass.
            return
        began_in = self._tasks[task]
        for past in [number for number in self._tasks if number <= task]:  # Includes passes that failed.
            del self._tasks[past]
        self.exchange.on_backward_end(began_in)
