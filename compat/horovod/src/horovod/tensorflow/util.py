"""What scripts ask of TensorFlow by this module."""

import tensorflow as tf

__all__ = ["_executing_eagerly"]


def _executing_eagerly() -> bool:
    """Return whether operations are executed at once."""
    return bool(tf.executing_eagerly())
