"""The hyper-parameters of train_torch.py, train_keras.py and of benchmarks/strategies.

Adagrad of the table gets gradients summed over the batch of all ranks, not averaged: what a row of the data
does to the row of a rare id is the same whatever the batch, and one first sum is right for each. Nor is the
table's rate scaled with the ranks. docs/howto/strategies.md has the search.
"""

RATE = 0.001  # of Adam, for the layers, on one rank
TABLE_RATE = 0.1  # of Adagrad, for the table
# Adagrad's sum at the beginning. With 0 the first row with an id moves it by the whole rate, wherever that
# row's label points: rare ids are noise then. With much more, only frequent ids learn.
FIRST_SUM = 1000.0
SCALE_RATE = 0.5  # Adam's rate is multiplied by the number of ranks to this power
# Steps. Adagrad's first steps move frequent ids by the whole rate, whatever their gradient: without a warm-up
# the factors grow too far in them, and the layers learn little from such factors for epochs.
WARMUP = 100


def warm(step: int, steps: int = WARMUP) -> float:
    """Return the factor of all rates in a step, which are numbered from 1."""
    return min(1.0, step / max(steps, 1))
