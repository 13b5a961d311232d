"""Exchange buckets of gradients on their device as soon as each bucket is complete.

Note [Direct buckets]
Gradients that are exchanged on their device (``DeviceExchange``) have a separate fast path. After
several steps in which all ranks computed the same gradients, a copy of each bucket is exchanged as soon as
the bucket is complete, without a round of agreement, in a fixed order and through a dedicated communicator.
The mask at the end of the pass shows whether all ranks had the expected gradients. If so, the copies become
the gradients. Otherwise, all ranks drop them and exchange the gradients by rounds.

The calls must match across ranks, so each rank launches all buckets in each pass, with zeros for gradients
that it has not computed. Only a rank that has joined, or has failed to launch a bucket, stops launching.
The mask shows this to the other ranks, which then abort the communicator and continue by rounds.
On a GPU, the calls of this communicator are not ordered relative to the calls of rounds, because each
communicator has its own stream.
"""

from __future__ import annotations

from ringdance.training.gradients.buckets import Buckets
from ringdance.training.gradients.mask import Deviation
from ringdance.training.gradients.source import GradientSource


class DirectBuckets:
    """Launches this rank's buckets in the current pass. See Note [Direct buckets].

    Threads: as for ``exchange.GradientExchange``.

    Args:
        source: Access to the gradients.
        buckets: Buckets of the exchange, equal on all ranks.

    Attributes:
        deviation: How this rank's launches differ from what all ranks expect.
    """

    def __init__(self, source: GradientSource, buckets: Buckets) -> None:
        self.deviation = Deviation.NONE
        self._source = source
        self._buckets = buckets
        self._launched = 0

    def launch(self, rest: bool = False) -> None:
        """Launch the next complete buckets in order, or all remaining ones if ``rest``.

        Thread: autograd, or exchanging if ``rest``. Raises the engine's error if the engine has closed.
        """
        buckets = self._buckets.all
        if self._buckets.engine.closed:
            raise self._buckets.engine.end.error()
        while self._launched < len(buckets):
            bucket = buckets[self._launched]
            if bucket.lacking and not rest:
                return
            self._launched += 1
            if bucket.expected and self.deviation is not Deviation.MISSING:
                # Set this first: if launch() raises or refuses, this rank is one call behind the others.
                before, self.deviation = self.deviation, Deviation.MISSING
                bucket.work = self._source.launch(self._buckets.call(bucket.name), bucket.expected)
                if bucket.work is not None:
                    self.deviation = before

    def spoil(self) -> None:
        """Record that the launched buckets contain the gradients of another pass. Thread: script."""
        if self._launched:
            self.deviation = max(self.deviation, Deviation.OTHER)

    def restart(self) -> None:
        """Start with the first bucket again, after an exchange. Thread: exchanging."""
        self._launched = 0
        self.deviation = Deviation.NONE

    def leave(self, abort: bool) -> None:
        """Drop the launched buckets. Thread: exchanging.

        Args:
            abort: If True, abort the communicator, because a rank has not launched the same buckets.
        """
        self.restart()
        self._buckets.restart()
        if abort:
            self._source.close_direct()
