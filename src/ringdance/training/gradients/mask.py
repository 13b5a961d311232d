"""The mask: a few bytes with which the ranks agree on the gradients of a step.

Note [Mask]
The ranks reduce their masks with ``MAX``, byte by byte. A rank that has joined contributes zeros. The layout
for n gradients and m ranks in the process set (m is 0 unless the gradients are on a device) is::

    n bytes   kind of each gradient, 0 if this rank has not computed it (see ``source.AS_DENSE``)
    1 byte    step + 1: the maximum shows the latest step
    1 byte    STEPS - step: the maximum shows the earliest step. Neither byte is zero
    1 byte    1 if this rank does not want overlap
    1 byte    this rank's ``Deviation``
    m bytes   1 at this rank's position. If a position remains 0, that rank has joined
    4 bytes   digest of the parameter names, and its complement. If ranks have different digests, the
              maximum of the digests or of the complements differs from this rank's own
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.request import Collective, ReduceOp, Work
from ringdance.errors import MismatchError
from ringdance.training.collectives import Call

# Steps are counted modulo STEPS, so that a step number fits into a byte. STEPS is a multiple of the number of
# tags in the fast path, so that neighboring steps have different tags even if the count wraps.
STEPS = 248
_FIXED = 4  # Number of bytes between the gradients' kinds and the ranks' positions.


class DifferentStepsError(Exception):
    """Gradients of different steps were exchanged together."""


class Deviation(IntEnum):
    """How a rank deviates from what all ranks expect. The maximum over the ranks counts."""

    NONE = 0
    OTHER = 1  # It has different gradients, or launched buckets with the gradients of another pass.
    # It has not launched all buckets, because it has joined or a launch failed. See Note [Direct buckets].
    MISSING = 2


def digest_of(text: str, size: int = 4) -> bytes:
    """Return a digest of ``size`` bytes, which is equal on all ranks for equal text."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


class StepMask:
    """The current step's mask. No other code depends on its layout. See Note [Mask].

    Thread: the one that exchanges.

    Args:
        engine: Engine of this rank.
        call: Call that has the name and process set of the exchange.
        names: Parameter names.

    Attributes:
        kinds: Kinds of the gradients that any rank has computed. ``wait`` sets this and the other attributes.
        all_want_overlap: True if all ranks want to exchange during backward.
        deviation: Maximum deviation over the ranks. Joined ranks count only if the gradients are on a device.
    """

    def __init__(self, engine: Engine, call: Call, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = names
        self._call = Call(Collective.ALLREDUCE, f"{call.name}.mask", ReduceOp.MAX, set_id=call.set_id)
        digest = digest_of("\0".join(names), 2)
        self._digest = digest + bytes(255 - byte for byte in digest)
        labels.note(f"allreduce.{call.name}.mask", call.name or "", "list of the gradients", names)

    def submit(self, kinds: bytearray, step: int, overlap: bool, on_device: bool, deviation: int) -> None:
        """Send this rank's mask."""
        members = self._engine.members(self._call.set_id) if on_device else ()
        fixed = bytes((step + 1, STEPS - step, not overlap, deviation))
        present = bytes(rank == self._engine.rank for rank in members)
        self._bytes = kinds + fixed + present + self._digest
        array = np.frombuffer(self._bytes, np.uint8)
        self._work: Work = self._call.submit(self._engine, (array,), (array,))

    def wait(self) -> None:
        """Wait for the masks of all ranks.

        Raises:
            MismatchError: The ranks have different parameters.
            DifferentStepsError: The ranks are at different steps.
        """
        error: MismatchError | None = None
        try:
            self._work.wait()
        except MismatchError as mismatch:
            error = mismatch
        if error is not None or not self._bytes.endswith(self._digest):
            raise MismatchError(
                f"The ranks' optimizers have different parameters: rank {self._engine.rank} "
                f"({self._engine.hosts[self._engine.rank]}) has {len(self._names)} parameters, the last of "
                f"which is {self._names[-1]!r}. Call add_param_group() on all ranks of the process set, with "
                f"the same parameters, between the same two steps. {error or ''}".rstrip()
            ) from error
        count = len(self._names)
        latest, before_earliest, separate, deviation = self._bytes[count : count + _FIXED]
        if latest - 1 != STEPS - before_earliest:
            steps = f"{STEPS - before_earliest} to {latest - 1}"
            raise DifferentStepsError(f"ranks are at different steps: {steps} (modulo {STEPS})")
        self.kinds = bytes(self._bytes[:count])
        self.all_want_overlap = not separate
        any_joined = 0 in self._bytes[count + _FIXED : -len(self._digest)]
        self.deviation = Deviation.MISSING if any_joined else Deviation(deviation)
