"""``hvd.elastic``: training that continues after an error."""

from ringdance.torch.elastic import *
from ringdance.torch.elastic import __all__ as __all__

# Last, so that these names are the modules of this package.
from horovod.torch.elastic import sampler as sampler, state as state  # isort: skip
