"""Settings for all tests in this directory."""

import torch_first  # noqa: F401
