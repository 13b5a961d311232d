"""Data for TensorFlow: shards of a ``tf.data.Dataset``, and the tf.data service."""
