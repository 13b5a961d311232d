"""Hyperparameters of train_torch.py and train_keras.py, also used in benchmarks/strategies.

The embedding table is updated by Adagrad with gradients that are summed, not averaged, over the global batch.
The effect of a row on a rare id's embedding then does not depend on the batch size, so the same initial
accumulator works for all batch sizes. docs/howto/training/strategies.md contains the measurements.
"""

RATE = 0.0005  # Adam's learning rate for the layers, for a global batch of BATCH rows
BATCH = 2048
# Adam's rate is multiplied by (rows in the global batch / BATCH) to this power, and the table's rate is
# divided by the square root of that factor. A smaller batch means more steps per epoch, in which the layers
# would overfit at the full rate. With a larger batch, the gradients of ids that occur in every row keep their
# signs for longer, so the table needs a lower rate.
SCALE_RATE = 0.5
# Adagrad's learning rate for the table. The 13 numeric ids occur in every row, with values up to 13, so an
# update of their factors moves the logits of all rows together. At a rate of 0.03 and BATCH rows, the logits
# overshoot at the end of the warm-up.
TABLE_RATE = 0.015
# Initial value of Adagrad's accumulator, the sum of squared gradients. If it were 0, the first row with an id
# would move the id's embedding by the full learning rate, so rare ids would add only noise. If it were much
# larger, only the embeddings of frequent ids would change noticeably.
FIRST_SUM = 1000.0
# Warm-up steps. Adagrad's first steps move the embeddings of frequent ids by the full learning rate, however
# small the gradient. A longer warm-up does not help: the accumulators grow too slowly during it, so the steps
# after it are too large.
WARMUP = 20


def scaled(batch: int, power: float) -> float:
    """Return the factor for Adam's learning rate, given the number of rows in the global batch.

    The table's rate is divided by the square root of this factor.
    """
    return float((batch / BATCH) ** power)


def warm(step: int, steps: int = WARMUP) -> float:
    """Return the factor by which warm-up reduces all learning rates in a step, numbered from 1."""
    return min(1.0, step / max(steps, 1))
