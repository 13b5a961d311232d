"""Collectives as TensorFlow graph operations, with kernels written in Python."""
