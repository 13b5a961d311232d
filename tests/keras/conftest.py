"""Rank tests of ringdance.keras. KERAS_BACKEND is chosen before: see tests/dropin/test_keras.py."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # for `nets`

# Not every environment has every framework.
collect_ignore_glob = [] if importlib.util.find_spec("keras") else ["test_*.py"]
