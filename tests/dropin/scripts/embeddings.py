"""Sparse embedding gradients, and the ways in which the optimizer groups and scales gradients."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of all processes together")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-model", default="./embeddings.pt")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
WORDS, LENGTH, KINDS = 300, 6, 4
generator = torch.Generator().manual_seed(11)
texts = torch.randint(WORDS, (args.steps * args.batch_size, LENGTH), generator=generator)
kinds = texts.sum(1) % KINDS


class Bag(nn.Module):
    """Mean of word vectors, followed by two dense layers. A further layer is never used."""

    def __init__(self, sparse):
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, sparse=sparse)
        self.hidden = nn.Linear(16, 16)
        self.spare = nn.Linear(3, 3)
        self.out = nn.Linear(16, KINDS)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.words(x).mean(1))))


def trained(sparse=True, make_groups=None, **options):
    torch.manual_seed(2)
    model = Bag(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if make_groups:
        options["groups"] = make_groups(model)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    for step in range(args.steps):
        begin = step * args.batch_size
        batch = slice(begin + hvd.rank(), begin + args.batch_size, hvd.size())
        optimizer.zero_grad()
        F.cross_entropy(model(texts[batch]), kinds[batch]).backward()
        optimizer.step()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    alike = torch.equal(hvd.broadcast(mine, root_rank=0), mine)
    assert alike, f"rank {hvd.rank()} has different weights from rank 0"
    return model.state_dict()


results = {
    "sparse": trained(),
    "sparse_as_dense": trained(sparse_as_dense=True),
    "sparse_predivide": trained(gradient_predivide_factor=2.0),
    "dense": trained(sparse=False),
    "groups": trained(sparse=False, groups=2),
    "lists": trained(sparse=False, make_groups=lambda model: [list(model.hidden.parameters()),
                                                              list(model.out.parameters())]),
    "predivide": trained(sparse=False, gradient_predivide_factor=float(hvd.size())),
    "fp16": trained(sparse=False, compression=hvd.Compression.fp16),
}
print(f"rank {hvd.rank()}: {len(results)} ways")
if hvd.rank() == 0:
    torch.save(results, args.save_model)
