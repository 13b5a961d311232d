"""Data loading for TensorFlow: loaders, and sharding of a ``tf.data.Dataset``."""
