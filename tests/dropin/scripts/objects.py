"""Python objects sent between processes, and a user-defined compression."""

import argparse
import random

import torch
import torch.nn.functional as F
from digits import Net, digits, fingerprint

import horovod.torch as hvd
from horovod.torch.compression import Compressor

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)

# The first process draws this experiment's settings, and all processes use them.
config = None
if hvd.rank() == 0:
    seed = random.Random(5).randrange(1000)
    config = {"lr": 0.25, "seed": seed, "layers": [32, 10], "note": "größer " * 2000}
config = hvd.broadcast_object(config, root_rank=0, name="config")
torch.manual_seed(config["seed"])
print(f"rank {hvd.rank()}: seed {config['seed']}, layers {config['layers']}, note of {len(config['note'])}")


class FixedPoint(Compressor):
    """Integer multiples of 2**-14 as int32, whose sums are exact in any order."""

    @staticmethod
    def compress(tensor):
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return (tensor * 2**14).round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor if ctx is None else tensor.to(ctx) / 2**14


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"] / hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=FixedPoint, op=hvd.Sum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
images, labels = digits(args.data_dir, train=True).tensors
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config["seed"]))
batches = order[hvd.rank() :: hvd.size()].split(120 // hvd.size())
losses = []
for step in range(args.steps):
    batch = batches[step % len(batches)]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# Lists with a different length on each process.
tail = hvd.allgather_object({"rank": hvd.rank(), "losses": losses[-1 - hvd.rank() :]}, name="losses")
if hvd.rank() == 0:
    print("losses of ranks " + " ".join(f"{one['rank']}:{len(one['losses'])}" for one in tail))
    print(f"Loss: {sum(one['losses'][-1] for one in tail) / hvd.size():.4f}")
images, labels = digits(args.data_dir, train=False).tensors
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
if hvd.rank() == 0:
    print(f"Accuracy: {100 * accuracy.item():.2f}%")
prints = hvd.allgather_object(fingerprint(model))
print(f"rank {hvd.rank()}: weights {fingerprint(model)}, of all {len(set(prints))} different")
