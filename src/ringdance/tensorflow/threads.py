"""How many threads TensorFlow computes with: a rank's share of the host's cores, unless told otherwise."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from ringdance import session
from ringdance.training.options import share_of_cores, usable_cores

__all__ = ["computing_threads", "share_cores"]

_log = logging.getLogger("ringdance")


def _told(kind: str) -> int:
    """Return the user's number of threads, 0 if there is none."""
    number = int(getattr(tf.config.threading, f"get_{kind}_op_parallelism_threads")())
    text = os.environ.get(f"TF_NUM_{kind.upper()}OP_THREADS", "")
    return number or (int(text) if text.isdigit() else 0)


def computing_threads() -> int:
    """Return with how many threads TensorFlow computes within an operation."""
    return _told("intra") or usable_cores()


def share_cores() -> None:
    """Let TensorFlow's pools have as many threads as this rank's share of the host's cores.

    Each process else takes all cores, and ranks of one host take them from each other. The user's own
    numbers stay, as do pools that TensorFlow has already made.
    """
    local_size = session.engine().local_size
    if local_size == 1:
        return
    for kind in ("intra", "inter"):
        if not _told(kind):
            try:
                getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")(share_of_cores(local_size))
            except RuntimeError:
                _log.info("TensorFlow was in use before init(): its threads stay as many as there are cores.")
                return
