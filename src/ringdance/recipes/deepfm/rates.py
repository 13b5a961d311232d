"""Hyperparameters for train_torch.py, train_keras.py and benchmarks/strategies.

Adagrad, which updates the table, gets gradients that are summed over the global batch, not averaged. The
effect of a data row on a rare id's embedding is then independent of the batch size, so the same initial
accumulator works for all batch sizes. docs/howto/training/strategies.md has the measurements.
"""

RATE = 0.0005  # Adam's learning rate for the layers, if the global batch has BATCH rows
BATCH = 2048
# Adam's rate is multiplied by (rows in the global batch / BATCH) to this power, and the table's rate is
# divided by the square root of that factor. A smaller batch means more steps per epoch, in which the layers
# would overfit at the full rate. With a larger batch, the gradients of ids that occur in every row keep their
# signs for longer, so the table needs a lower rate.
SCALE_RATE = 0.5
# Adagrad's learning rate for the table. The 13 numeric ids occur in every row, with values up to 13, so an
# update to their factors moves the logits of all rows together. At a rate of 0.03 and BATCH rows, the logits
# overshoot at the end of the warm-up.
TABLE_RATE = 0.015
# Initial value of Adagrad's accumulator, the sum of squared gradients. If it were 0, the first row with an id
# would move its embedding by the whole learning rate toward that row's label, so rare ids would add
# nothing but noise. If it were much larger, only frequent ids would learn.
FIRST_SUM = 1000.0
# Warm-up steps. Adagrad's first steps move frequent ids by the whole learning rate, however small the
# gradient. A longer warm-up does not help: the accumulators stay small while it lasts, so the steps after it
# are too large.
WARMUP = 20


def scaled(batch: int, power: float) -> float:
    """Return the factor for Adam's learning rate, given the number of rows in the global batch.

    The table's rate is divided by the square root of this factor.
    """
    return float((batch / BATCH) ** power)


def warm(step: int, steps: int = WARMUP) -> float:
    """Return the warm-up factor for all learning rates in a step. Steps are numbered from 1."""
    return min(1.0, step / max(steps, 1))
