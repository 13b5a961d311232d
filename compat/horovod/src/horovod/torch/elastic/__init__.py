"""``hvd.elastic``: training that goes on after an error."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__

# Last: the modules of this package.
from horovod.torch.elastic import sampler as sampler, state as state  # isort: skip
