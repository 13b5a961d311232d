"""Hosts that differ from the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ringdance.doctor.registry import Finding


def odd_ones(values: Mapping[str, str], mend: str, what: str = "") -> Iterator[Finding]:
    """One finding if all hosts have the same value; else one for each value that is not the most common.

    Args:
        values: by host, as text for people. Of equally common ones the first host's is taken as usual.
        mend: the line that mends a difference.
        what: what is compared, before the value.
    """
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: counts[value])
    before = f"{what} " if what else ""
    if len(counts) == 1:
        yield Finding(f"{before}{usual} on all hosts", hosts=tuple(values))
        return
    names = [host for host, value in values.items() if value == usual]
    for value in counts:
        if value != usual:
            odd = tuple(host for host, own in values.items() if own == value)
            yield Finding(
                f"{before}{value} on {', '.join(odd)}, but {usual} on {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if names[3:] else ""),
                mend,
                hosts=odd,
            )
