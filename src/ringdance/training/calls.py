"""A collective call apart from its tensors: what a graph keeps of it, as text, until it is run.

Frameworks that compile (a TensorFlow graph, a JAX program) separate when a call is written down from when
it runs. The text holds all that the run needs, so nothing has to be looked up by a number that
another process, or a saved graph, would not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import ArgumentError
from ringdance.training import collectives, sparse

if TYPE_CHECKING:
    from ringdance.core.engine import Engine

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call.

    Args:
        collective: what it does.
        name: key that matches the ranks' calls; ``None`` matches by order.
        operation: of a reduction.
        prescale, postscale: factors of a reduction.
        set_id: the process set.
        root: of a broadcast, a global rank.
        grouped: whether it was called with a list of tensors.
        equal_splits: of an alltoall without splits.
        tables: names of tables of which rows are reduced (``training.sparse``). The inputs are for each its
            values, the keys, and as a scalar how many rows it has; the results are in the same order.
    """

    kind: Collective
    name: str | None = None
    operation: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    set_id: int = 0
    root: int = -1
    grouped: bool = False
    equal_splits: bool = False
    tables: tuple[str, ...] = ()

    @property
    def keeps_shapes(self) -> bool:
        """Whether each result has the shape of its input, so that memory for it can be given."""
        return self.kind in (Collective.ALLREDUCE, Collective.BROADCAST) and not self.tables

    def but(self, **changes: Any) -> Call:
        """Return the call with some fields changed."""
        return replace(self, **changes)

    def text(self) -> str:
        """Return the call as text, the same for equal calls."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_text(text: str) -> Call:
        """Return the call that ``text()`` wrote."""
        fields = json.loads(text)
        fields["kind"] = Collective(fields["kind"])
        fields["operation"] = ReduceOp(fields["operation"])
        fields["tables"] = tuple(fields["tables"])
        return Call(**fields)

    def submit(
        self, engine: Engine, inputs: collectives.Arrays, outputs: collectives.Arrays | None = None,
        splits: Sequence[collectives.Array | None] = (None,), wake: bool = False,
    ) -> Work:
        """Submit the call.

        Args:
            engine: the engine.
            inputs: contiguous views.
            outputs: where the results go; only if the call ``keeps_shapes``.
            splits: of an alltoall, for each tensor.
            wake: whether the engine thread starts it.

        Raises:
            ArgumentError: as the function of ``collectives`` says.
        """
        name, set_id, grouped = self.name, self.set_id, self.grouped
        if self.tables:
            return sparse.submit(
                engine, inputs, self.tables, name=name, average=self.operation is ReduceOp.AVERAGE,
                set_id=set_id,
            )
        if self.kind is Collective.ALLREDUCE:
            return collectives.allreduce(
                engine, inputs, outputs, name=name, operation=self.operation, prescale=self.prescale,
                postscale=self.postscale, set_id=set_id, grouped=grouped, wake=wake,
            )
        if self.kind is Collective.BROADCAST:
            return collectives.broadcast(
                engine, inputs, outputs, self.root, name=name, set_id=set_id, grouped=grouped, wake=wake
            )
        if self.kind is Collective.ALLGATHER:
            return collectives.allgather(engine, inputs, name=name, set_id=set_id, grouped=grouped, wake=wake)
        if self.kind is Collective.ALLTOALL:
            return collectives.alltoall(
                engine, inputs, splits, name=name, set_id=set_id, grouped=grouped, wake=wake
            )
        if self.kind is Collective.REDUCESCATTER:
            return collectives.reducescatter(
                engine, inputs, name=name, operation=self.operation, prescale=self.prescale,
                postscale=self.postscale, set_id=set_id, grouped=grouped, wake=wake,
            )
        raise ArgumentError(f"{self.kind.name} is not a call with tensors.")
