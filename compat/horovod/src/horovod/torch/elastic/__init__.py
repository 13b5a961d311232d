"""``hvd.elastic``: training that goes on after an error."""

from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from ringdance.training.elastic import ObjectState, State, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
