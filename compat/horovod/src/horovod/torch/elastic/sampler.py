"""A sampler that knows which samples of an epoch are done."""

from ringdance.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
