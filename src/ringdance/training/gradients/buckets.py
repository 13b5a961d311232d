"""Divide the gradients of an exchange into buckets, and reduce the buckets.

Note [Buckets]
Overlap: if all ranks have spare cores (which the mask shows), buckets are exchanged during the backward
pass. Otherwise, all gradients are sent in one request at the end of the pass. Buckets and their order depend
only on the order of the parameters, never on timing.

Early buckets: the *expected* gradients are the ones that the last exchange reduced. A rank that has computed
exactly the expected gradients of a bucket sends them along with the mask, which saves a round trip. This is
safe: if any rank has sent the bucket, the union of the masks contains its gradients, so every rank sends it.
If the union does not contain them, no rank has sent the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.request import ReduceOp, Work
from ringdance.training.collectives import Call, prepared
from ringdance.training.gradients.mask import digest_of
from ringdance.training.gradients.source import AS_DENSE, DENSE, GradientSource
from ringdance.training.gradients.sparse import SparseExchange


@dataclass
class Bucket:
    """Gradients that are sent in one request."""

    name: str
    members: tuple[int, ...]
    expected: tuple[int, ...]  # Gradients that the last exchange reduced, the same on all ranks.
    lacking: int = 0  # Number of missing expected gradients plus unexpected ones.
    work: Work | None = None
    kinds: bytes = b""  # Kinds of the gradients before an early send, which makes sparse ones dense.


def parts_of(
    indices: Sequence[int], nbytes: Callable[[int], int], on_device: bool = False
) -> list[list[int]]:
    """Divide parameters, in backward order, into parts of an eighth of their total size (1 to 32 MiB).

    Args:
        indices: Indices of the parameters, in order.
        nbytes: Function that returns a parameter's size in bytes.
        on_device: If True, divide as DistributedDataParallel does: 1 MiB first, to start early, then 25 MiB.
    """
    first = later = min(max(sum(map(nbytes, indices)) // 8, 1 << 20), 32 << 20)
    if on_device:
        first, later = 1 << 20, 25 << 20
    parts: list[list[int]] = []
    filled = limit = 0
    for index in reversed(indices):
        if filled >= limit:
            limit = later if parts else first
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += nbytes(index)
    return [part[::-1] for part in parts]


@dataclass
class Buckets:
    """The buckets of an exchange. ``all`` and ``expected`` are equal on all ranks.

    Threads: as for ``exchange.GradientExchange``.

    Attributes:
        engine: Engine of this rank.
        source: Access to the gradients.
        whole: Call that has the name, process set, operation and scales of the exchange.
        names: Parameter names.
        groups: Groups of parameters, by index, whose gradients are reduced together.
        all: Buckets in the order in which they are sent.
        of: The bucket of each parameter.
        expected: The expected gradients in all buckets. See Note [Buckets].
    """

    engine: Engine
    source: GradientSource
    whole: Call
    names: Sequence[str]
    groups: Sequence[tuple[int, ...]]

    def __post_init__(self) -> None:
        self.expected = set(range(len(self.names)))
        self.divide(overlap=False)

    def call(self, name: str) -> Call:
        """Return the call for a bucket, the same object each time. Thread: exchanging or autograd."""
        how = self.whole
        return prepared(how.kind, name, how.operation, how.prescale, how.postscale, how.set_id, grouped=True)

    def divide(self, overlap: bool) -> None:
        """Create a bucket for each group. The other parameters form one bucket, or several if ``overlap``.

        Thread: exchanging.
        """
        rest = sorted(set(range(len(self.names))).difference(*self.groups))
        parts: list[Sequence[int]] = [*self.groups]
        if overlap:
            parts += parts_of(rest, self.source.nbytes, self.source.on_device)
        elif rest:
            parts.append(rest)
        self.all: list[Bucket] = []
        for number, part in enumerate(parts):
            expected = tuple(index for index in part if index in self.expected)
            self.all.append(Bucket(f"{self.whole.name}.{number}", tuple(part), expected))
            self._note(self.all[-1].name, part)
        by_index = {index: bucket for bucket in self.all for index in bucket.members}
        self.of = [by_index[index] for index in range(len(self.names))]
        self.restart()

    def _note(self, name: str, indices: Sequence[int]) -> None:
        if not labels.known(f"grouped_allreduce.{name}", len(indices)):
            chosen = [self.names[index] for index in indices]
            labels.note(f"grouped_allreduce.{name}", self.whole.name or "", "gradients", chosen)

    def restart(self, wait: bool = False) -> None:
        """Discard the requests, and prepare for the gradients of the next pass.

        Thread: exchanging or script.

        Args:
            wait: If True, first wait for incomplete requests, because they still read the gradients.
        """
        for bucket in self.all:
            if wait and bucket.work is not None and not bucket.work.done():
                bucket.work.wait()
            bucket.work = None
            bucket.lacking = len(bucket.expected)

    def send_early(self, bucket: Bucket, computed: bytearray) -> None:
        """Send a complete bucket during backward, unless it has a sparse gradient. Thread: autograd."""
        kinds = self.source.kinds(computed, bucket.expected)
        if min(kinds, default=DENSE) >= AS_DENSE:
            bucket.kinds = bytes(kinds)
            bucket.work = self._send(bucket, bucket.expected, zeros=b"", wake=True)

    def restore_kinds(self, kinds: bytearray) -> None:
        """Restore the kinds that gradients had before their buckets were sent. Thread: exchanging."""
        for bucket in self.all:
            if bucket.work is not None:
                for index, kind in zip(bucket.expected, bucket.kinds, strict=True):
                    kinds[index] = kind

    def send_complete(self, kinds: bytearray, zeros: bytes) -> None:
        """Send the buckets for which this rank has exactly the expected gradients, all dense.

        See Note [Buckets]. Thread: exchanging.

        Args:
            kinds: Kinds of this rank's gradients.
            zeros: Which gradients count as zero. See ``GradientSource.buffers``.
        """
        for bucket in self.all:
            if bucket.work is None and bucket.expected:
                computed = [index for index in bucket.members if kinds[index]]
                if tuple(computed) == bucket.expected and min([kinds[n] for n in computed]) >= AS_DENSE:
                    bucket.work = self._send(bucket, bucket.expected, zeros)

    def reduce(self, union: bytes, zeros: bytes) -> None:
        """Send the gradients that have not been sent, wait for all requests, and write the results back.

        Afterwards, the dense gradients of the union are the expected ones. Thread: exchanging.

        Args:
            union: The kinds of the gradients, on which the ranks have agreed.
            zeros: As in ``send_complete``.
        """
        works: list[tuple[Work, tuple[int, ...]]] = []
        for bucket in self.all:
            dense = tuple(index for index in bucket.members if union[index] >= AS_DENSE)
            expected = bucket.expected
            extra = dense
            if expected and (dense == expected or set(expected).issubset(dense)):
                if bucket.work is None:
                    bucket.work = self._send(bucket, expected, zeros)
                works.append((bucket.work, expected))
                extra = tuple(sorted(set(dense).difference(expected)))
            if extra:
                works.append((self._send(bucket, extra, zeros), extra))
            bucket.expected = dense
        self.expected = {index for index, kind in enumerate(union) if kind >= AS_DENSE}
        sparse = [index for index, kind in enumerate(union) if 0 < kind < AS_DENSE]
        rows = self._send_sparse(sparse, union) if sparse else None
        for work, indices in works:
            work.wait()
            self.source.write_back(indices, union)
        if rows is not None:
            for index, summed in zip(sparse, rows.wait(), strict=True):
                self.source.write_back_sparse(index, union[index], summed)

    def _send_sparse(self, sparse: list[int], union: bytes) -> SparseExchange:
        parts = [self.source.sparse_rows(index, union[index]) for index in sparse]
        return SparseExchange(
            self.engine, parts, [self.names[index] for index in sparse],
            name=f"{self.whole.name}.sparse.{digest_of(repr(sparse)).hex()}",
            average=self.whole.operation is ReduceOp.AVERAGE, set_id=self.whole.set_id,
        )

    def _send(self, bucket: Bucket, indices: tuple[int, ...], zeros: bytes, wake: bool = False) -> Work:
        name = bucket.name
        if len(indices) != len(bucket.members):
            name = f"{name}.{digest_of(repr(indices)).hex()}"
            self._note(name, indices)
        return self.source.send(self.call(name), self.engine, indices, zeros, wake)

    def abandon(self) -> None:
        """Wait up to a second for each request after an error, because requests use the gradients' memory.

        Thread: exchanging or script.
        """
        for bucket in self.all:
            work, bucket.work = bucket.work, None
            if work is not None:
                try:
                    work.wait(1.0)
                except Exception:
                    pass  # The caller raises the first error.
