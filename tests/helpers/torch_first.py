"""Import what PyTorch's optimizers need. Some builds crash if TensorFlow is imported before it."""

from __future__ import annotations

import contextlib
import importlib

with contextlib.suppress(ImportError):
    importlib.import_module("torch._dynamo")
