"""The interface to a framework's own communicator, for tensors that stay on their device.

Members agree on these requests as on all others, and execute them in the same order. The device decides what
"done" means: on a GPU, a work is done when its exchange is enqueued. The stream that uses the results waits
for ``DeviceResults.event``. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ringdance.core.request import Description, Request, Steps


class DeviceResults(list[Any]):
    """Results of a request, valid on the device after ``event``. ``received``: rows from an alltoall."""

    event: Any = None
    received: list[list[int]] | None = None


class DeviceExchange(Protocol):
    """The communicator for one process set's tensors on one kind of device."""

    def execute(self, pairs: Sequence[tuple[Description, Request | None]], members: Sequence[int]) -> Steps:
        """Run a batch and return ``DeviceResults`` for each request.

        Args:
            pairs: Descriptions and requests, in agreed order. The request is None if this rank has joined.
            members: The global ranks of the process set.
        """

    def check(self) -> None:
        """Raise an error that the communicator has detected since the last call."""

    def close(self, agreed: bool) -> None:
        """Free everything. Unless ``agreed``, abort what is in progress without waiting for it."""
