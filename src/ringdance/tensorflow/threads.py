"""Limit TensorFlow's threads to a rank's share of the cores."""

from __future__ import annotations

import contextlib
import os
from functools import cache

import tensorflow as tf

from ringdance.host.limits import usable_cores
from ringdance.training import session
from ringdance.training.gradients.cores import share_of_cores


def _chosen() -> int:
    """Return the number of intra-op threads that the user has set, or 0."""
    text = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    number = tf.config.threading.get_intra_op_parallelism_threads()
    return int(number) or (int(text) if text.isdigit() else 0)


@cache
def _on_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def computing_threads() -> int:
    """Return the number of cores that TensorFlow keeps busy, or 1 if it computes on a GPU."""
    return 1 if _on_gpu() else _chosen() or usable_cores()


def _limit() -> None:
    """Limit TensorFlow to this rank's share of the cores, after ``init()``.

    Otherwise, each process would compute on all cores of the host. The number of threads stays the same if
    the user has set it or TensorFlow was already in use. The number of operations that run concurrently is
    not limited, because a call that waits for other ranks blocks a thread.
    """
    if session.engine().local_size > 1 and not _chosen():
        with contextlib.suppress(RuntimeError):  # Raised if TensorFlow is already in use.
            tf.config.threading.set_intra_op_parallelism_threads(share_of_cores())


session.at_init(_limit)
