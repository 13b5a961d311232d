"""What loaders of images and of tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringdance.data.order import Plan


class Batches:
    """What loaders share: the plan of the epochs, and a conversion of batches for a framework.

    Attributes:
        plan: which samples come in which batch.
        convert: what makes of a batch of NumPy arrays what is yielded.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.convert: Callable[[Any], Any] = lambda batch: batch

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Choose the epoch of the next iteration, and after how many samples of its order it begins.

        Args:
            epoch: its number, from 0.
            position: the ``position`` of the last batch that was consumed, with any number of ranks.

        Raises:
            ArgumentError: the epoch has fewer samples.
        """
        self.plan.set_epoch(epoch, position)

    def position_after(self, batches: int) -> int:
        """Return the ``position`` of the batch after which so many have come since ``set_epoch``."""
        return self.plan.position_after(batches)

    def __len__(self) -> int:
        """Return the number of batches left in the epoch, equal on all ranks."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch; threads end with it, also if it is left early."""
        return map(self.convert, self.batches())

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch as NumPy arrays."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads of iterations that are still under way."""
