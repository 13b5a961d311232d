"""Processes with different amounts of data: those that finish first join and wait for the others."""

import argparse

import torch

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batches", type=int, default=4, help="batches of rank 0; each next rank has 3 more")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--save-model", default="./join.pt")
args = parser.parse_args()

hvd.init()
torch.manual_seed(1 + hvd.rank())
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

mine = args.batches + 3 * hvd.rank()
for epoch in range(args.epochs):
    generator = torch.Generator().manual_seed(100 * epoch + hvd.rank())
    for _ in range(mine):
        inputs = torch.randn(5, 4, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        loss = ((model(inputs) - inputs.sum(1, keepdim=True) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
    if torch.cuda.is_available():
        last = hvd.join(hvd.local_rank())
    else:
        last = hvd.join()
    # Those that finished early lack the last steps, so all continue with the last process's weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    batches = hvd.allreduce(torch.tensor(mine), op=hvd.Sum, name="batches").item()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: rank {last} was the last to join, {batches} batches in all", flush=True)

print(f"rank {hvd.rank()}: weights {model.weight.tolist()}")
if hvd.rank() == 0:
    torch.save(model.state_dict(), args.save_model)
