"""The hyper-parameters of train_torch.py, train_keras.py and of benchmarks/strategies.

Adagrad of the table gets gradients summed over the batch of all ranks, not averaged: what a row of the data
does to the row of a rare id is the same whatever the batch, and one first sum is right for each.
docs/howto/strategies.md has the measurements.
"""

RATE = 0.0005  # of Adam, for the layers, if a batch of all ranks has BATCH rows
BATCH = 2048
# Adam's rate is multiplied by (rows in a batch of all ranks / BATCH) to this power, and the table's is
# divided by the root of that. A smaller batch makes more steps in an epoch, in which the layers would learn
# the rows by heart. In a larger one the gradients of ids that all rows have keep their signs for more steps.
SCALE_RATE = 0.5
# Of Adagrad, for the table. The factors of the 13 numbers are in every row, with values up to 13, so the
# logits of all rows move together: at 0.03 and BATCH rows they overshoot at the end of the warm-up.
TABLE_RATE = 0.015
# Adagrad's sum at the beginning. With 0 the first row with an id moves it by the whole rate, wherever that
# row's label points: rare ids are noise then. With much more, only frequent ids learn.
FIRST_SUM = 1000.0
# Steps. Adagrad's first steps move frequent ids by the whole rate, whatever their gradient. A long warm-up
# is no better: the sums remain small in it, and the steps after it are then too large.
WARMUP = 20


def scaled(batch: int, power: float) -> float:
    """Return the factor of Adam's rate for a batch of so many rows, of all ranks together.

    The table's rate is divided by its square root.
    """
    return float((batch / BATCH) ** power)


def warm(step: int, steps: int = WARMUP) -> float:
    """Return the factor of all rates in a step, which are numbered from 1."""
    return min(1.0, step / max(steps, 1))
