"""Adasum of two tensors, and a training with Adasum."""

import argparse

import torch
import torch.nn.functional as F
from digits import Net, digits, fingerprint

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05, help="not scaled by the number of processes")
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)

# Orthogonal gradients are added, parallel ones are averaged, and others give something in between.
orthogonal = torch.zeros(hvd.size())
orthogonal[hvd.rank()] = 2.0
print(f"rank {hvd.rank()}: orthogonal {hvd.allreduce(orthogonal, op=hvd.Adasum, name='o').tolist()}")
parallel = hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum, name="p")
print(f"rank {hvd.rank()}: parallel {parallel.tolist()}")
skew = torch.tensor([1.0, 0.0]) if hvd.rank() == 0 else torch.tensor([1.0, 1.0])
print(f"rank {hvd.rank()}: skew {hvd.allreduce(skew, op=hvd.Adasum, name='s').tolist()}")

images, labels = digits(args.data_dir, train=True).tensors
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=2,
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none)
for epoch in range(args.epochs):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for batch in order[hvd.rank() :: hvd.size()].split(48):
        optimizer.zero_grad()
        for part in batch.chunk(2):
            (F.cross_entropy(model(images[part]), labels[part]) / 2).backward()
        optimizer.step()

images, labels = digits(args.data_dir, train=False).tensors
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
if hvd.rank() == 0:
    print(f"Accuracy: {100 * accuracy.item():.2f}%")
print(f"rank {hvd.rank()}: weights {fingerprint(model)}")
