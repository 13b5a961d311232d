"""The tf.data service."""
