"""Rank tests of ringdance.keras with Keras 2. tests/runners/jobs.py sets TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
