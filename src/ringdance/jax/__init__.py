"""Ringdance for JAX: ``import ringdance.jax as hvd``.

Each rank is one process with its own devices. Collectives can be called eagerly and within ``jit``, ``grad``
and control flow. ``distributed`` wraps an optax transformation so that gradients are reduced first::

    hvd.init()
    tx = hvd.distributed(optax.adam(1e-3 * hvd.size()))
    params = hvd.broadcast_parameters(params, root_rank=0)
"""

from ringdance.training.exports import *  # isort: skip  # First, because some names are replaced below.

from ringdance.jax import operations
from ringdance.jax import threads as threads
from ringdance.jax.device import nccl_built as nccl_built
from ringdance.jax.loaders import image_loader, table_loader
from ringdance.jax.memory import Compression
from ringdance.jax.operations import *
from ringdance.jax.optimizer import distributed
from ringdance.jax.state import broadcast_parameters
from ringdance.training.exports import __all__ as __all__
from ringdance.training.gradients.compression import Compressor

__all__ = [
    *__all__, *operations.__all__, "Compression", "Compressor",
    "broadcast_parameters", "distributed", "image_loader", "table_loader",
]
