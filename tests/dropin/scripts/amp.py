"""Mixed precision: autocast, a gradient scaler, and clipping between synchronize and step."""

import argparse

import torch
import torch.nn.functional as F
from digits import digits, fingerprint
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--amp-dtype", choices=("float16", "bfloat16"), default="float16")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=48, help="of all processes together")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--overflow-at", type=int, default=5, help="a step with an infinite loss on one process")
args = parser.parse_args()

hvd.init()
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(7)
torch.set_num_threads(1)
device = torch.device("cuda" if cuda else "cpu")

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=40)

train_set = digits(args.data_dir, train=True)
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=args.batch_size // hvd.size(), sampler=sampler)

step, skipped = 0, []
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=getattr(torch, args.amp_dtype)):
            output = model(data)
            loss = F.cross_entropy(output.float(), target)
        if step == args.overflow_at and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
        step += 1

test_set = digits(args.data_dir, train=False)
images, labels = test_set.tensors
with torch.no_grad():
    correct = (model(images.to(device)).argmax(1).cpu() == labels).float().mean()
if hvd.rank() == 0:
    print(f"Accuracy: {100 * correct.item():.2f}%")
print(f"rank {hvd.rank()}: skipped steps {skipped}, scale {scaler.get_scale():g}")
print(f"rank {hvd.rank()}: weights {fingerprint(model)}")
