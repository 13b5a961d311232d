"""The interface through which ``exchange.GradientExchange`` uses a binding's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ringdance.core.engine import Engine
from ringdance.core.request import Work
from ringdance.training.collectives import Array, Call
from ringdance.training.gradients.sparse import Rows

# Kinds in the mask: 0 (no gradient), d (sparse, with d sparse dimensions), AS_DENSE + d (sparse, but reduced
# as a dense gradient and converted back), and DENSE. The mask contains the maximum over the ranks,
# so a gradient that is dense on any rank is reduced as dense, and a bucket that was already sent stays valid.
AS_DENSE = 128
DENSE = 255


class GradientSource(Protocol):
    """Access to a binding's gradients by parameter index.

    Attributes:
        advice: Code that a script needs so that all ranks have equal parameters and optimizer state.
    """

    advice: str

    @property
    def on_device(self) -> bool:
        """True if gradients are exchanged on their device. See ``DeviceExchange``."""

    def kinds(self, computed: bytearray, indices: Sequence[int] | None = None) -> bytearray:
        """Return the kinds of all gradients, or of ``indices``: 0 for gradients that are not ``computed``."""

    def unreduced(self, computed: bytearray) -> list[int]:
        """Return the indices of gradients that are neither ``computed`` nor the results of an exchange."""

    def forget(self) -> None:
        """Stop treating any gradient as the result of an exchange, because all were cleared."""

    def settle(self) -> None:
        """Record the end of a step. Later changes to the results of exchanges belong to the next step."""

    def forget_changed(self) -> None:
        """Stop treating gradients as results of an exchange if they have changed since ``settle``."""

    def gradient_views(self, indices: Sequence[int]) -> tuple[Array, ...] | None:
        """Return views of gradients to reduce in place, or ``None`` unless all are dense and contiguous."""

    def buffers(self, indices: Sequence[int], zeros: bytes) -> tuple[Array, ...]:
        """Return contiguous views to reduce in place, with zeros for gradients missing on this rank.

        If ``zeros[index]`` is set, the gradient counts as zero, whatever its value. ``zeros`` may be empty.
        Sparse gradients are made dense.
        """

    def send(self, call: Call, engine: Engine, indices: Sequence[int], zeros: bytes, wake: bool) -> Work:
        """Submit the reduction of gradients: the views from ``buffers``, or a copy on their device."""

    def open_direct(self, engine: Engine, set_id: int, name: str) -> bool:
        """Create the communicator for ``launch`` if needed, on all members. Returns True if it exists."""

    def launch(self, call: Call, indices: Sequence[int]) -> Any:
        """Exchange a copy of the gradients without a round. Returns an object that works like a ``Work``.

        Returns None if the gradients' dtypes have changed since the last round.

        Members launch the same buckets in the same order: see Note [Direct buckets].
        """

    def close_direct(self) -> None:
        """Abort the communicator for ``launch``, if it exists."""

    def write_back(self, indices: Sequence[int], union: bytes) -> None:
        """Store the reduced values as gradients. ``union`` contains the kind of each gradient."""

    def sparse_rows(self, index: int, sparse_dims: int) -> Rows:
        """Return the entries of a sparse gradient, in any order, possibly repeated. Empty without a gradient.

        Keys are row-major indices into the first ``sparse_dims`` dimensions.
        """

    def write_back_sparse(self, index: int, sparse_dims: int, rows: Rows) -> None:
        """Set the gradient to the merged entries of all ranks, which have ascending, unique keys."""

    def nbytes(self, index: int) -> int:
        """Return the size of the gradient in bytes."""

    def sample(self, indices: Sequence[int], names: Sequence[str]) -> tuple[list[str], Array]:
        """Return parameter names for messages, and a sample of the parameters. See ``weights``."""
