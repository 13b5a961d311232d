"""TensorFlow helpers that scripts import from this module."""

import tensorflow as tf

__all__ = ["_executing_eagerly"]


def _executing_eagerly() -> bool:
    """Return True if operations are executed eagerly."""
    return bool(tf.executing_eagerly())
