"""shard() for torch: loaders see each sample once, and training on uneven shares can join."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ringdance.torch as hvd
from ringdance.errors import MismatchError

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def of_all(loader: DataLoader[Any]) -> tuple[Counter[int], list[int]]:
    """Return how often each sample was seen on any rank, and each rank's number of batches."""
    batches = [torch.as_tensor(item).flatten().tolist() for item in loader]
    gathered = hvd.allgather_object(batches)
    return Counter(itertools.chain(*itertools.chain(*gathered))), [len(item) for item in gathered]


def check(seen: Counter[int], counts: list[int], length: int, ends: str) -> None:
    if ends == "drop":
        assert set(seen.values()) == {1}
        assert len(seen) == length // SIZE * SIZE
    else:
        assert sorted(seen) == list(range(length))
        assert seen.total() == (length if ends == "join" else -(-length // SIZE) * SIZE)
    if ends != "join":
        assert len(set(counts)) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ends", ["pad", "drop", "join"])
def test_a_data_set(ends: str, shuffle: bool, workers: int) -> None:
    length = 10 * SIZE + 1
    data = TensorDataset(torch.arange(length))
    sampler = hvd.shard(data, ends=ends, shuffle=shuffle)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers,
                        collate_fn=lambda rows: torch.stack([value for (value,) in rows]))
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        check(*of_all(loader), length, ends)
        orders.append(list(sampler))
    assert (orders[0] != orders[1]) is shuffle


@pytest.mark.ranks(2, 3, 4)
def test_different_lengths_are_noticed_on_all_ranks() -> None:
    with pytest.raises(MismatchError, match=r"length differs between the ranks \(rank 0: 20, rank 1: 21"):
        hvd.shard(range(20 + RANK), ends="pad")


@pytest.mark.parametrize("sparse", [False, True])
def test_training_on_uneven_shares_that_join(sparse: bool) -> None:
    """Ranks that run out join, the others still divide by all ranks, and the last one has every step."""
    length = 4 * SIZE + 1  # the first rank has one sample more
    torch.manual_seed(0)
    table = torch.nn.Embedding(length, 2, sparse=sparse)
    before = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
    )
    for place in hvd.shard(length, ends="join"):
        optimizer.zero_grad()
        table(torch.tensor([place])).sum().backward()
        optimizer.step()
    last = hvd.join()
    assert last == 0 or SIZE == 1
    hvd.broadcast_parameters(table.state_dict(), root_rank=last)
    assert torch.allclose(table.weight, before - 1.0 / SIZE)
