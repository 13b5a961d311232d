"""Programs for the ranks of these tests."""

PLACES = """
import os
from mpi4py import MPI
names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"
numbers = [int(os.environ["HOROVOD_" + name]) for name in names]
print(os.uname().nodename, *numbers, MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank))
"""

# Linear regression on each rank's own data: all ranks end with the same weights, which depend on all data.
TRAINING = """
import numpy as np
import ringdance.numpy as rd

rd.init()
random = np.random.default_rng(rd.rank())
inputs, truth = random.normal(size=(256, 8)), np.arange(8.0)
weights = rd.broadcast(np.full(8, float(rd.rank() + 1)), 0, name="start")
for step in range(60):
    gradient = inputs.T @ (inputs @ weights - inputs @ truth) / len(inputs)
    weights = weights - 0.3 * rd.allreduce(gradient, name="gradient")
assert np.allclose(weights, truth, atol=1e-3), weights
wide = rd.allreduce(np.full(3_000_000, rd.rank() + 1.0, np.float32), op=rd.Sum, name="wide")
assert (wide == rd.size() * (rd.size() + 1) / 2).all()
print(f"rank {rd.rank()} of {rd.size()}: loss {float(np.sum((weights - truth) ** 2)):.12e}")
rd.shutdown()
"""

# The address and port that the launcher chose, and a sum over all ranks by torch.distributed.
ENV_INIT = """
import os
import torch
torch.distributed.init_process_group("gloo", init_method="env://")
summed = torch.tensor([int(os.environ["RINGDANCE_RANK"]) + 1.0])
torch.distributed.all_reduce(summed)
print(summed.item(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
torch.distributed.destroy_process_group()
"""

# One rank on each host needs some seconds after SIGTERM, which kills the others.
SAVES = """
import os, signal, sys, time
from mpi4py import MPI
got = []
if os.environ["RINGDANCE_LOCAL_RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: got.append(1))
MPI.COMM_WORLD.Barrier()
print("ready", flush=True)
while not got:
    time.sleep(0.02)
time.sleep(float(sys.argv[1]))
print("saved after", len(got), "signal", flush=True)
os._exit(0)
"""
