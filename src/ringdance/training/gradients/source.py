"""The interface between a binding's gradients and ``optimizer.GradientExchange``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ringdance.core.request import Work
from ringdance.training.gradients.sparse import Rows

if TYPE_CHECKING:
    from ringdance.core.engine import Engine
    from ringdance.training.collectives import Call

Array = np.ndarray[Any, Any]

# Kinds in the mask: 0 nothing; d sparse with d sparse dimensions; AS_DENSE + d the same, but to be reduced as
# a dense one and made sparse again; DENSE. The mask holds the maximum over the ranks, so a gradient
# that is dense anywhere is reduced as dense; then a bucket that was sent stays valid.
AS_DENSE = 128
DENSE = 255


class GradientSource(Protocol):
    """A binding's gradients, by the index of the parameter.

    Attributes:
        advice: the lines by which a script gives all ranks the same parameters and optimizer's state.
    """

    advice: str

    @property
    def on_device(self) -> bool:
        """Whether gradients are exchanged on their device: see ``core.exchange.device``."""

    def kinds(self, computed: bytearray, indices: Sequence[int] | None = None) -> bytearray:
        """Return for each parameter, or for ``indices``, its kind of gradient; 0 if not ``computed``."""

    def unreduced(self, computed: bytearray) -> list[int]:
        """Return which parameters have a gradient that is not ``computed`` nor the result of an exchange."""

    def forget(self) -> None:
        """Take no gradient for the result of an exchange: all have been cleared."""

    def settle(self) -> None:
        """Note that a step ends: what changes the results of exchanges from now on belongs to the next."""

    def forget_changed(self) -> None:
        """Take no gradient for the result of an exchange that has changed since ``settle``."""

    def gradient_views(self, indices: Sequence[int]) -> tuple[Array, ...] | None:
        """Return views of gradients, to be reduced in place; ``None`` unless all are dense and contiguous."""

    def buffers(self, indices: Sequence[int], zeros: bytes) -> tuple[Array, ...]:
        """Return contiguous views, to be reduced in place; zeros for a gradient that is missing here.

        Where ``zeros[index]`` is set, the gradient counts as zero whatever is there; empty: nowhere. A
        sparse one is made dense.
        """

    def send(self, call: Call, engine: Engine, indices: Sequence[int], zeros: bytes, wake: bool) -> Work:
        """Submit the reduction of gradients: those of ``buffers``, or a copy on their device."""

    def open_direct(self, engine: Engine, set_id: int, name: str) -> bool:
        """Make the communicator of ``launch``, or keep it; all members call this. Return if there is one."""

    def launch(self, call: Call, indices: Sequence[int]) -> Any:
        """Exchange a copy of the gradients without a round; return what is used as a ``Work``.

        None if they are of other dtypes than those that were sent by a round.

        Members launch the same in the same order: see Note [Direct buckets].
        """

    def close_direct(self) -> None:
        """Abort the communicator of ``launch``, if there is one."""

    def write_back(self, indices: Sequence[int], union: bytes) -> None:
        """Make what was reduced the gradients, each of its kind in ``union``."""

    def sparse_rows(self, index: int, sparse_dims: int) -> Rows:
        """Return the entries of a sparse gradient, in any order, repeated ones too; none if missing.

        Their keys count the elements of the first ``sparse_dims`` dimensions, the last of these fastest.
        """

    def write_back_sparse(self, index: int, sparse_dims: int, rows: Rows) -> None:
        """Set the gradient to the entries of all ranks: ascending keys, each once."""

    def nbytes(self, index: int) -> int:
        """Return the size of the gradient in bytes."""

    def sample(self, indices: Sequence[int], names: Sequence[str]) -> tuple[list[str], Array]:
        """Return names of parameters for messages, and a sample: see ``weights``."""


@dataclass
class Bucket:
    """Gradients that are sent in one request."""

    name: str
    members: tuple[int, ...]
    expected: tuple[int, ...]  # agreed: what was reduced last time
    missing: int = 0  # of the expected ones, not computed yet
    unexpected: int = 0  # computed, though not expected
    work: Work | None = None
    kinds: bytes = b""  # of the expected ones, when sent during the pass; sending makes sparse ones dense


@dataclass
class State:
    """What happened since the last step or zero_grad."""

    passes: int = 0
    exchanged_at: int = -1  # value of passes at the last exchange; -1: none yet
    computed: bytearray = field(default_factory=bytearray)  # since the last exchange
    reduced: bytearray = field(default_factory=bytearray)  # in this step
