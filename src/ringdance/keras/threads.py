"""Join the job from Keras; limit its backend to this rank's share of the cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringdance.keras.library import keras
from ringdance.keras.reduction import BACKENDS, binding
from ringdance.training import basics
from ringdance.training.process_sets import ProcessSet

__all__ = ["init"]


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the job as the binding of Keras's backend does.

    On TensorFlow and JAX this limits the rank to its share of the cores, see ``ringdance.tensorflow.init``
    and ``ringdance.jax.init``; PyTorch itself follows ``OMP_NUM_THREADS``. Arguments and errors are those
    of ``ringdance.training.basics.init``.
    """
    join = binding().init if keras.backend.backend() in BACKENDS else basics.init
    join(comm, process_sets)
