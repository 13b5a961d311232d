"""A sampler that knows which samples of an epoch are done."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__
