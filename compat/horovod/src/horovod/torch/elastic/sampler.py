"""A sampler that remembers which samples of an epoch have been processed."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__
