"""A sampler that knows which samples of an epoch are done."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from ringdance.training.elastic_indices import ElasticIndices

__all__ = ["ElasticSampler"]


class ElasticSampler(ElasticIndices, torch.utils.data.Sampler[int]):
    """Gives each rank its share of a data set; after a restart, of what is left of the epoch.

    Put it in the state, so that it is committed with the weights::

        sampler = hvd.elastic.ElasticSampler(data)
        loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(net, optimizer, sampler=sampler, epoch=0)
        ...
        for number, batch in enumerate(loader):
            ...
            state.sampler.record_batch(number, 32)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)   # at the end of the epoch

    How samples are dealt out, and the attributes: ``ringdance.training.elastic_indices``.

    Args:
        dataset: has a length.
        shuffle: in another order each epoch.
        seed: of the order; the same on all ranks.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        super().__init__(len(dataset), shuffle, seed)
