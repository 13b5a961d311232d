"""Collectives as operations of a TensorFlow graph: their kernels, written in Python."""
