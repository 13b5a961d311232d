"""Several hosts: ranks of a host meet in their window, the owners of a slice all-reduce between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ringdance.core.arithmetic import Reduction
from ringdance.core.exchange.base import Array, Progress, Steps
from ringdance.core.exchange.window import WindowExchange
from ringdance.core.exchange.wire import Flights, WireExchange
from ringdance.core.pieces import pieces
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
        place, count = transport.host_group.index(transport.rank), len(transport.host_group)
        self._inside = WindowExchange(transport.window, place, count, piece_bytes, small_bytes, progress)
        self._owners = Flights(owners, self._inside.piece_bytes, small_bytes, progress)

    def allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        if how.wire is None or sum(view.nbytes for view in inputs) <= self._small:
            return super().allreduce(inputs, outputs, how)
        return self._large_allreduce(inputs, outputs, how)

    def _large_allreduce(self, inputs: Sequence[Array], outputs: Sequence[Array], how: Reduction) -> Steps:
        """While pieces travel between hosts, the host's ranks meet for those that come next and have come."""
        inside = self._inside
        sizes = tuple([view.size for view in inputs])
        plan = pieces(sizes, inside.piece_bytes // how.dtype.itemsize, inside.size)
        owned = [slices[inside.rank] for slices in plan]
        yield from self._owners.run(
            [part[-1].end - part[0].at if part else 0 for part in owned],
            how,
            lambda number, buffer: inside.sum_inside(plan[number], inputs, how, buffer),
            lambda number, buffer: inside.hand_out(plan[number], buffer, outputs, how),
        )
