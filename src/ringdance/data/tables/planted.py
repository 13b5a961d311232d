"""Generate rows like Criteo's with known click probabilities, as a benchmark for models.

A row's logit comes from a factorization machine with hidden weights and factors: it is the sum of a bias, a
weight for each field, and the inner products of the factors for all pairs of fields. A linear model can learn
only the weights. Rare categories have neither weights nor factors, because these could not be learned from
any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringdance.data.order import check_positive
from ringdance.data.tables import criteo
from ringdance.data.tables.rows import Array, Rows

BLOCK = 1 << 14
"""Rows per block. The block number is part of the seed, so a short table is a prefix of a long one."""
_CATEGORIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Number of categories in each column, as in Criteo's display advertising challenge."""
_MISSING_NUMBERS = (0.44, 0, 0.22, 0.22, 0.02, 0.22, 0.04, 0, 0.04, 0.44, 0.04, 0.76, 0.22)
_MISSING_CATEGORIES = {2: 0.03, 3: 0.03, 5: 0.12, 11: 0.03, 15: 0.03, 18: 0.44, 19: 0.44, 20: 0.03, 21: 0.76,
                       23: 0.03, 24: 0.44, 25: 0.44}  # fmt: skip
_MEDIANS = (1, 3, 6, 4, 2700, 33, 3, 7, 38, 1, 1, 1, 4)  # medians of the numeric columns
_POWER = 1.15  # the share of the k-th most frequent category is proportional to about k ** -_POWER
_KNOWN = 1024  # only this many of the most frequent categories per column have weights
_PAIRED = 120  # only columns with at most this many categories have factors, so that all pairs are frequent
_FACTORS = 4
_POSITIVE = 0.25


@dataclass(frozen=True)
class PlantedRows:
    """Generated rows, and the click probabilities from which their labels were drawn.

    Attributes:
        labels: Shape (n,), int8. 1 for a click.
        numbers: Shape (n, 13), float64. Whole numbers, or NaN if missing.
        texts: Strings of the 26 categorical columns: 8 hexadecimal digits, or empty if missing.
        probabilities: Shape (n,), float64. Probability of a click.
    """

    labels: Array
    numbers: Array
    texts: list[criteo.Texts]
    probabilities: Array

    def part(self, start: int, stop: int) -> PlantedRows:
        """Return a range of rows, without copying them."""
        return PlantedRows(
            self.labels[start:stop], self.numbers[start:stop],
            [(begins[start : stop + 1], data) for begins, data in self.texts],
            self.probabilities[start:stop],
        )  # fmt: skip

    def rows(self, table_size: int = 1_000_000) -> Rows:
        """Convert the columns to labels, ids and values, as if they had been read from a file."""
        rows = Rows.empty(len(self.labels), criteo.FIELDS)
        rows.labels[:] = self.labels
        criteo.transform(self.numbers, self.texts, rows, table_size)
        return rows


def planted(rows: int, seed: int = 0, day: int = 0, start: int = 0) -> Iterator[PlantedRows]:
    """Generate rows, up to 16,384 at a time.

    Args:
        rows: Number of rows. A smaller number yields a prefix of the same rows.
        seed: Random seed for the hidden weights and the rows.
        day: Day number, from 0. Each day has different rows, generated with the same weights.
        start: Number of the first row.
    """
    check_positive(rows=rows)
    stop = start + rows
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        drawn = _Hidden(seed).draw(np.random.RandomState([seed, day, block]))
        yield drawn.part(max(start - block * BLOCK, 0), stop - block * BLOCK)


@lru_cache(maxsize=1)
class _Hidden:
    """The fields' hidden weights (column 0 of each array) and factors (other columns)."""

    def __init__(self, seed: int) -> None:
        random = np.random.RandomState([seed, 1 << 20])
        self.numbers = random.standard_normal((criteo.NUMERIC, 1 + _FACTORS)) * 0.06
        self.categories = []
        for count in _CATEGORIES:
            table = random.standard_normal((min(count, _KNOWN) + 1, 1 + _FACTORS)) * 0.4
            share = np.arange(1, len(table)) ** -_POWER
            table[:, 0] *= 0.6
            # Center the factors. Otherwise, a linear model could learn part of the interactions.
            table[:, 1:] -= share @ table[:-1, 1:] / share.sum()
            table[:, 1:] *= count <= _PAIRED
            table[-1] = 0  # used for all rare categories
            self.categories.append(table)
        logits = self.columns(random)[3]
        low, high = -30.0, 30.0
        for _ in range(60):
            self.bias = (low + high) / 2
            if _sigmoid(logits + self.bias).mean() < _POSITIVE:
                low = self.bias
            else:
                high = self.bias

    def draw(self, random: np.random.RandomState) -> PlantedRows:
        """Draw one block of rows."""
        numbers, words, present, logits = self.columns(random)
        probabilities = _sigmoid(logits + self.bias)
        labels = (random.random_sample(BLOCK) < probabilities).astype(np.int8)
        return PlantedRows(labels, numbers, list(map(_texts, words, present)), probabilities)

    def columns(self, random: np.random.RandomState) -> tuple[Array, Array, Array, Array]:
        """Draw numbers, categories as 32-bit words, a mask of those present, and logits without the bias."""
        total, squares = np.zeros((2, BLOCK, 1 + _FACTORS))
        numbers = np.empty((BLOCK, criteo.NUMERIC))
        for column, hidden in enumerate(self.numbers):
            drawn = np.floor(_MEDIANS[column] * np.exp(1.5 * random.standard_normal(BLOCK)))
            missing = random.random_sample(BLOCK) < _MISSING_NUMBERS[column]
            numbers[:, column] = np.where(missing, np.nan, drawn)
            effect = np.where(missing, 0, np.log1p(drawn))[:, None] * hidden
            total += effect
            squares += effect**2
        words = np.empty((criteo.CATEGORICAL, BLOCK), np.uint32)
        present = np.empty((criteo.CATEGORICAL, BLOCK), bool)
        for column, table in enumerate(self.categories):
            rank = _power_law(random.random_sample(BLOCK), _CATEGORIES[column])
            words[column] = criteo.mixed(rank.astype(np.uint64) | np.uint64(column + 1 << 32))
            present[column] = random.random_sample(BLOCK) >= _MISSING_CATEGORIES.get(column, 0)
            effect = table[np.where(present[column], np.minimum(rank, len(table) - 1), -1)]
            total += effect
            squares += effect**2
        pairs = (total[:, 1:] ** 2 - squares[:, 1:]).sum(axis=1) / 2
        return numbers, words, present, total[:, 0] + pairs


def _power_law(uniform: Array, count: int) -> Array:
    """Map uniform random numbers in [0, 1) to category numbers, from 0 for the most frequent one."""
    power = 1 - _POWER
    ranks = (1 + uniform * ((count + 1) ** power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, count - 1)


def _texts(words: Array, there: Array) -> criteo.Texts:
    """Convert words to 8 hexadecimal digits, or to an empty string if missing."""
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    data = _DIGITS[words[there][:, None] >> shifts & np.uint32(15)]
    return np.append(0, np.cumsum(there * 8)).astype(np.int32), np.ascontiguousarray(data).reshape(-1)


_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def _sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))
