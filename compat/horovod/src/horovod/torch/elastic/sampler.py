"""A sampler that remembers which of an epoch's samples are done."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__
