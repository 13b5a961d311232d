"""Hooks on the gradients that a backward pass accumulates, and on its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ringdance.errors import ArgumentError
from ringdance.torch import _private
from ringdance.torch._private import compiler_disable


class Hooks:
    """Calls back for each gradient that backward has accumulated, and at the end of the pass.

    Note [Backward passes within others]
    Checkpointing with ``use_reentrant=True`` runs a backward pass inside of a node of another, to any depth;
    all parameters may be inside. The pass has ended when the outermost one has. torch calls back at the end
    of the pass that a thread works on at the moment, so an inner pass has to wait until the thread
    is back in the outermost: it hooks one of the nodes that this runs next, after the node that holds the
    inner pass. A pass that raises never gets there; its hook then does nothing in later passes.

    Args:
        parameters: what to watch; ``late`` checks again those that need no gradient. The list may
            grow: see ``watch_new``.
        computed: called with the parameter's index.
        on_backward_end: called at the end of a backward pass that computed at least one.
        end_matters: whether ``on_backward_end`` has to be called at the end of the pass. Where torch has no
            callback for the end: True raises, False calls ``on_backward_end`` after each gradient.
    """

    def __init__(
        self, parameters: Sequence[Tensor], computed: Callable[[int], None],
        on_backward_end: Callable[[], None], end_matters: bool = True,
    ) -> None:
        self._parameters = parameters
        self._computed = computed
        self._on_backward_end = on_backward_end
        self._end_matters = end_matters
        self._tasks: set[int] = set()  # passes whose end will be noticed
        self._late: list[int] = []
        self._watched = 0
        self.watch_new()

    def watch_new(self) -> None:
        """Watch the parameters that the list has gained."""
        for index in range(self._watched, len(self._parameters)):
            if self._parameters[index].requires_grad:
                self._watch(index)
            else:
                self._late.append(index)
        self._watched = len(self._parameters)

    def _watch(self, index: int) -> None:
        computed, tasks, graph_task = self._computed, self._tasks, _private.graph_task

        def hook(_: Tensor) -> None:
            computed(index)
            if graph_task() not in tasks:
                self._wait_for_end()

        register: Any = self._parameters[index].register_post_accumulate_grad_hook
        register(compiler_disable(hook))

    def _wait_for_end(self) -> None:
        """Arrange that ``_end`` is called; see Note [Backward passes within others]."""
        if not _private.has_end_callback():
            if self._end_matters:
                raise ArgumentError(
                    "torch has no callback for the end of this backward pass, as in compiled autograd: set "
                    "torch._dynamo.config.compiled_autograd = False, or give DistributedOptimizer "
                    "reduce_in_backward=False; gradients are then reduced in step(), after any clipping."
                )
            self._on_backward_end()
            return
        task = _private.graph_task()
        self._tasks.add(task)
        node = _private.outermost_function_node()
        if node is None:
            _private.queue_callback(self._end)
            return
        following = next((one for one, _ in node.next_functions if one is not None), None)
        if following is None:
            return

        def in_outermost(_: Any) -> None:
            handle.remove()
            self._tasks.discard(task)
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
        for past in [one for one in self._tasks if one <= task]:  # those of passes that raised too
            self._tasks.discard(past)
        self._on_backward_end()

    def late(self) -> list[int]:
        """Return parameters that have begun to need a gradient, have one, and were not watched so far."""
        if not self._late:
            return []
        begun = [index for index in self._late if self._parameters[index].requires_grad]
        for index in begun:
            self._watch(index)
            self._late.remove(index)
        return [index for index in begun if self._parameters[index].grad is not None]
