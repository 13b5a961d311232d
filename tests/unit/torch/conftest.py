"""For all tests of this directory."""

import torch_first  # noqa: F401
