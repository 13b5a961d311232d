"""Gradient compression."""

from ringdance.mxnet import Compression, Compressor
from ringdance.training.gradients.compression import NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor = Compression.fp16
