"""Count which images contributed to the final weights of a training, from its runs' logs (`--sample-log`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def each_once(counts: Counter[int], samples: int, batch: int) -> bool:
    """Return True if an epoch used each sample once, except those of an incomplete last batch."""
    return set(counts.values()) == {1} and set(counts) <= {*range(samples)} and samples - len(counts) < batch


def contained(runs: Sequence[Path]) -> dict[int, Counter[int]]:
    """Count each image by epoch, over the steps that contributed to the final weights.

    Args:
        runs: Log directories of consecutive runs. Each run resumed from a checkpoint of the previous one. If
            a later run repeated steps, the weights of the earlier ones were lost.
    """
    kept: list[dict] = []
    for directory in runs:
        lines = [json.loads(line) for log in directory.glob("rank-*.jsonl") for line in log.open()]
        begin = min(line["step"] for line in lines)
        kept = [line for line in kept if line["step"] < begin] + lines
    counts: dict[int, Counter[int]] = {}
    for line in kept:
        counts.setdefault(line["epoch"], Counter()).update(line["samples"])
    return counts
