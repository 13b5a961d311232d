"""The state of a PyTorch training run."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__
