"""Data for TensorFlow: loaders, and shards of a ``tf.data.Dataset``."""
