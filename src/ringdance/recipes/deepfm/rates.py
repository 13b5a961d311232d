"""The hyperparameters for train_torch.py, train_keras.py and benchmarks/strategies.

The table's Adagrad gets gradients summed over the batch of all ranks, not averaged. What a data row does to a
rare id's table row is then the same for any batch size, and a single first sum is right for all of them.
docs/howto/training/strategies.md has the measurements.
"""

RATE = 0.0005  # Adam's rate for the layers, if the batch of all ranks has BATCH rows
BATCH = 2048
# Adam's rate is multiplied by (rows in the batch of all ranks / BATCH) to this power, and the table's rate is
# divided by the square root of the result. A smaller batch makes more steps per epoch, in which the layers
# would overfit the rows. In a larger one, gradients of ids that all rows have keep their signs for longer.
SCALE_RATE = 0.5
# Adagrad's rate for the table. The factors of the 13 numbers are in every row, with values up to 13, so the
# logits of all rows move together. At 0.03 and BATCH rows, they overshoot at the end of the warm-up.
TABLE_RATE = 0.015
# Adagrad's initial sum. With 0, the first row with an id moves it by the whole rate, in the direction of that
# row's label, so rare ids become noise. With a much larger sum, only frequent ids learn.
FIRST_SUM = 1000.0
# Warm-up steps. Adagrad's first steps move frequent ids by the whole rate, whatever their gradient. A long
# warm-up is not better: the sums stay small during it, and the steps after it are then too large.
WARMUP = 20


def scaled(batch: int, power: float) -> float:
    """Return the factor for Adam's rate, given the rows in the batch of all ranks.

    The table's rate is divided by the square root of this factor.
    """
    return float((batch / BATCH) ** power)


def warm(step: int, steps: int = WARMUP) -> float:
    """Return the factor for all rates in a step. Steps are numbered from 1."""
    return min(1.0, step / max(steps, 1))
