"""The state of a training in PyTorch."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__
