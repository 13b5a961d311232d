"""Training that goes on after an error: ``hvd.elastic.run``, ``TorchState`` and ``ElasticSampler``.

What happens when is told in ``ringdance.training.elastic``.
"""

from ringdance.torch.elastic.sampler import ElasticSampler
from ringdance.torch.elastic.state import (
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from ringdance.training.elastic import ObjectState, State, run

__all__ = [
    "ElasticSampler", "ObjectState", "State", "StateHandler", "TorchState", "get_handler_registry", "run",
    "set_handler_registry",
]
