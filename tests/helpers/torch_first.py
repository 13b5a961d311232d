"""Load what PyTorch's optimizers need first. Some builds crash if TensorFlow was imported before it."""

from __future__ import annotations

import contextlib
import importlib

with contextlib.suppress(ImportError):
    importlib.import_module("torch._dynamo")
