"""Hooks on the gradients that a backward pass accumulates, and on its end."""

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
    """Close the hooks of all optimizers, ``but`` one, that have some of the parameters: a new one takes them.

    All ranks call this alike, so it does not wait for a garbage collection, whose time differs.
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
    """Tells an exchange of each gradient that backward has accumulated, and of the end of the pass.

    The parameters hold it weakly: it ends with its optimizer, or by ``close`` (see ``release``).

    Note [Backward passes within others]
    Checkpointing with ``use_reentrant=True`` runs a backward pass inside of a node of another, to any depth;
    all parameters may be inside. The pass has ended when the outermost one has. torch calls back at the end
    of the pass that a thread works on at the moment, so an inner pass has to wait until the thread
    is back in the outermost: it hooks one of the nodes that this runs next, after the node that holds the
    inner pass. A pass that raises never gets there; its hook then does nothing in later passes.

    Args:
        parameters: what to watch, as far as it needs gradients. The list may grow: see ``watch``.
        exchange: of their gradients. Where torch has no callback for the end of a pass, the first gradient
            raises if the end matters (``early``), else each gradient counts as a pass.
    """

    def __init__(self, parameters: Sequence[Tensor], exchange: GradientExchange) -> None:
        self.parameters = parameters
        self.exchange = exchange
        self._tasks: dict[int, int] = {}  # passes whose end will be noticed, with the steps they began in
        self._handles: dict[int, Any] = {}
        self.close = weakref.finalize(self, _close, self._handles, exchange)
        self.close.atexit = False
        _all[id(self)] = self
        self.watch()

    def watch(self) -> None:
        """Watch the parameters that are new in the list, or have begun to need a gradient."""
        if len(self._handles) < len(self.parameters):
            for index, parameter in enumerate(self.parameters):
                if index not in self._handles and parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles[index] = register(compiler_disable(self._hook(index)))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        found, tasks, graph_task = weakref.ref(self), self._tasks, _private.graph_task

        def hook(_: Tensor) -> None:
            if (hooks := found()) is not None:
                hooks.exchange.on_gradient(index)
                if graph_task() not in tasks:
                    hooks._wait_for_end()

        return hook

    def _wait_for_end(self) -> None:
        """Arrange that ``_end`` is called; see Note [Backward passes within others]."""
        if not _private.has_end_callback():
            if self.exchange.early:
                raise ArgumentError(
                    "torch has no callback for the end of this backward pass, as in compiled autograd: set "
                    "torch._dynamo.config.compiled_autograd = False, or give DistributedOptimizer "
                    "reduce_in_backward=False; gradients are then reduced in step(), after any clipping."
                )
            self.exchange.on_backward_end()
            return
        task = _private.graph_task()
        self._tasks[task] = self.exchange.step
        node = _private.outermost_function_node()
        if node is None:
            _private.queue_callback(self._end)
            return
        following = next((one for one, _ in node.next_functions if one is not None), None)
        if following is None:
            return

        def in_outermost(_: Any) -> None:
            handle.remove()
            self._tasks.pop(task, None)
            outer = _private.graph_task()
            # Numbers rise: in a pass that began later, this is the hook of one that has raised.
            if 0 <= outer < task and outer not in self._tasks:
                self._wait_for_end()

        handle = following.register_prehook(compiler_disable(in_outermost))

    @compiler_disable
    def _end(self) -> None:
        task = _private.graph_task()
        if task not in self._tasks:  # two threads have asked for the same
            return
        began_in = self._tasks[task]
        for past in [one for one in self._tasks if one <= task]:  # those of passes that raised too
            del self._tasks[past]
        self.exchange.on_backward_end(began_in)
