"""Several hosts: ranks of a host meet in their window, the owners of a slice all-reduce between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ringdance.core.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Progress, Steps
from ringdance.core.exchange.window import WindowExchange
from ringdance.core.exchange.wire import WireExchange
from ringdance.transport.base import Transport

__all__ = ["ClusterExchange"]


class ClusterExchange(WireExchange):
    """As ``WireExchange``, but large all-reduces are summed inside each host first.

    Only for hosts with equal numbers of members: then each slice has one owner on each host.
    """

    def __init__(
        self, transport: Transport, owners: Transport, piece_bytes: int, small_bytes: int, progress: Progress
    ) -> None:
        super().__init__(transport, piece_bytes, small_bytes, progress)
        assert transport.window is not None
        self._small = small_bytes
        self._inside = WindowExchange(
            transport.window,
            transport.host_group.index(transport.rank),
            len(transport.host_group),
            piece_bytes,
            small_bytes,
            progress,
            across=owners,
        )

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if how.wire is None or sum(view.nbytes for view in inputs) <= self._small:
            return super().allreduce(inputs, outputs, how)
        return self._inside.allreduce(inputs, outputs, how)
