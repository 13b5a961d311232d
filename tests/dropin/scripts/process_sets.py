"""Process sets that exist when the job starts, and process sets created while it runs."""

import torch
from mpi4py import MPI

import horovod.torch as hvd

# The members must be known before init().
size = MPI.COMM_WORLD.Get_size()
even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(list(range(1, size, 2)))
static = [even, odd] if size > 1 else []
hvd.init(process_sets=static)
mine = (even if hvd.rank() % 2 == 0 else odd) if static else hvd.global_process_set


def say(text):
    print(f"rank {hvd.rank()}: {text}", flush=True)


say(f"set {mine.process_set_id} of ranks {mine.ranks}, rank {mine.rank()} of {mine.size()} in it")
x = torch.full((2,), float(hvd.rank() + 1))
say(f"sum {hvd.allreduce(x, op=hvd.Sum, process_set=mine).tolist()}")
say(f"everybody's sum {hvd.allreduce(x, op=hvd.Sum).tolist()}")
say(f"gathered {hvd.allgather(x[: hvd.rank() + 1], process_set=mine).tolist()}")
say(f"from the last {hvd.broadcast(x, root_rank=mine.ranks[-1], process_set=mine).tolist()}")

# Two models: each half of the processes trains its own model.
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
for parameter in model.parameters():
    hvd.broadcast_(parameter.data, mine.ranks[0], process_set=mine)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=mine)
inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(mine.process_set_id or 0))
wanted = inputs @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.5 + mine.ranks[0]
share = slice(mine.rank(), None, mine.size())
for _ in range(60):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[share]), wanted[share]).backward()
    optimizer.step()
bias = hvd.allgather(model.bias.detach()).tolist()
say("biases " + " ".join(f"{one:.3f}" for one in bias))
hvd.shutdown()

# The same runtime once more, now with process sets that are added and removed.
hvd.init(process_sets="dynamic")
if hvd.size() > 1:
    others = hvd.add_process_set(hvd.ProcessSet(range(1, hvd.size())))
    first = hvd.add_process_set([0])
    say(f"included in others: {others.included()}, in first: {first.included()}")
    if others.included():
        say(f"average of others {hvd.allreduce(x, process_set=others).tolist()}")
    else:
        say(f"average of first {hvd.allreduce(x, process_set=first).tolist()}")
    removed = hvd.remove_process_set(others), hvd.remove_process_set(first)
    say(f"removed {removed}, id {others.process_set_id}, again {hvd.remove_process_set(others)}")
try:
    hvd.add_process_set(range(hvd.size()))
except ValueError as error:
    say(f"ValueError for a copy of the global set: {bool(str(error))}")
hvd.barrier()
say(f"average {hvd.allreduce(x).tolist()}")
