"""The interface to a framework's own communicator, for tensors that stay on their device.

Members agree on such requests as on all others, and execute them in one order. What "done" means is up to the
device: on a GPU a work is done when its exchange is enqueued, and the stream that uses the results waits for
``DeviceResults.event``; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ringdance.core.request import Description, Request, Steps


class DeviceResults(list[Any]):
    """The results of a request, valid on the device after ``event``; ``received``: rows, of an alltoall."""

    event: Any = None
    received: list[list[int]] | None = None


class DeviceExchange(Protocol):
    """The communicator of one process set's tensors on one kind of device."""

    def execute(self, pairs: Sequence[tuple[Description, Request | None]], members: Sequence[int]) -> Steps:
        """Run a batch; return ``DeviceResults`` for each request.

        Args:
            pairs: in agreed order; None for the request of a rank that has joined.
            members: the global ranks of the process set.
        """

    def check(self) -> None:
        """Raise an error that the communicator has met since the last call."""

    def close(self, agreed: bool) -> None:
        """Free everything; not ``agreed``: abort what is under way, without waiting for it."""
