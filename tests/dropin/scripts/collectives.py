"""The collectives one by one, as scripts use them below the optimizer, with an assertion for each result."""

import math
import time

import torch

import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
total = size * (size + 1) // 2


def same(got, wanted):
    wanted = torch.as_tensor(wanted, dtype=got.dtype, device=got.device)
    assert got.shape == wanted.shape, (rank, got, wanted)
    assert torch.allclose(got, wanted), (rank, got, wanted)


# Asynchronous: start all, do something else, then collect, in a different order on each rank.
names = [f"tensor{i}" for i in range(20)]
names = names[rank:] + names[:rank]
handles = {}
for name in names:
    x = torch.full((50,), float(rank + 1), device=device)
    handles[name] = hvd.allreduce_async(x, name=name, op=hvd.Sum)
deadline = time.time() + 60
while not all(hvd.poll(handle) for handle in handles.values()):
    assert time.time() < deadline, "poll never became true"
    time.sleep(0.001)
for name in sorted(handles):
    same(hvd.synchronize(handles[name]), [float(total)] * 50)

# In place, with all reductions and element types.
for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
    for op, wanted in ((hvd.Sum, total), (hvd.Min, 1), (hvd.Max, size), (hvd.Product, math.factorial(size))):
        x = torch.full((3, 2), rank + 1, dtype=dtype, device=device)
        assert hvd.allreduce_(x, op=op) is x
        same(x, [[wanted] * 2] * 3)
same(hvd.allreduce(torch.tensor(float(rank), device=device)), (size - 1) / 2)
same(hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
     [2.0 * total])
same(hvd.allreduce(torch.ones(2), False), [float(size)] * 2)  # `average`, by position
same(hvd.allreduce(torch.ones(2), True, "by.position", hvd.Compression.fp16), [1.0] * 2)

# Groups: all or nothing.
tensors = [torch.full((n + 1,), float(rank)) for n in range(5)]
for n, result in enumerate(hvd.grouped_allreduce(tensors, name="group", op=hvd.Sum)):
    same(result, [float(total - size)] * (n + 1))
handle = hvd.grouped_allreduce_async_(tensors, name="group")
hvd.synchronize(handle)
same(tensors[4], [(size - 1) / 2] * 5)
first, second = hvd.grouped_allgather([torch.tensor([rank]), torch.tensor([[rank, rank]])], name="gathers")
same(first, list(range(size)))
same(second, [[one, one] for one in range(size)])

# Different numbers of rows, and a rank without rows.
rows = hvd.allgather(torch.full((rank, 2), float(rank), device=device))
same(rows, [[float(one)] * 2 for one in range(size) for _ in range(one)] or torch.empty(0, 2))
words = torch.tensor(list(f"rank {rank}".encode()), dtype=torch.uint8)
assert bytes(hvd.allgather(words).tolist()).decode() == "".join(f"rank {one}" for one in range(size))

# From one rank to all ranks.
x = torch.arange(4.0) * (rank + 1)
same(hvd.broadcast(x, root_rank=size - 1), (torch.arange(4.0) * size).tolist())
handle = hvd.broadcast_async_(x, 0, "x")
hvd.synchronize(handle)
same(x, [0.0, 1.0, 2.0, 3.0])

# From all ranks to all ranks: rank r sends d + 1 rows to rank d.
splits = torch.arange(1, size + 1, dtype=torch.int32)
sent = torch.full((int(splits.sum()), 1), float(rank))
got, received = hvd.alltoall(sent, splits=splits)
same(received, [rank + 1] * size)
same(got, [[float(one)] for one in range(size) for _ in range(rank + 1)])
same(hvd.alltoall(torch.arange(size) + 10 * rank), [10 * one + rank for one in range(size)])
got, received = hvd.synchronize(hvd.alltoall_async(sent, [1] * size, "list"))  # the rest stays here
same(got, [[float(one)] for one in range(size)])

# Each rank gets a part of the sum: 7 rows distributed over `size` ranks.
part = hvd.reducescatter(torch.arange(7.0).repeat(2, 1).t().contiguous(), op=hvd.Sum)
counts = [7 // size + (one < 7 % size) for one in range(size)]
begin = sum(counts[:rank])
same(part, [[float(size * row)] * 2 for row in range(begin, begin + counts[rank])])
same(hvd.reducescatter(torch.ones(size, 3)), [[1.0] * 3])

# Differentiable.
x = torch.ones(2, requires_grad=True)
(hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum().backward()
same(x.grad, [float(total)] * 2)
x = torch.ones(2, requires_grad=True)
hvd.allgather(x * (rank + 1)).sum().backward()
same(x.grad, [float(rank + 1)] * 2)

# A sparse tensor: the entries of all ranks.
values = torch.zeros(size + 2)
values[0], values[rank + 1] = 1.0, 2.0
reduced = hvd.sparse_allreduce_async(values.to_sparse(), name="sparse", op=hvd.Average)()
same(reduced.to_dense(), [1.0] + [2.0 / size] * size + [0.0])

# Errors are reported, and the job continues.
if size > 1:
    try:
        hvd.allreduce(torch.ones(rank + 1), name="shapes")
        print("no error for different shapes")
    except RuntimeError as error:
        if not isinstance(error, hvd.HorovodInternalError):
            raise
hvd.barrier()
same(hvd.allreduce(torch.ones(1), name="shapes", op=hvd.Sum), [float(size)])

assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
assert hvd.is_initialized()
assert hvd.nccl_built() >= 0
assert hvd.mpi_threads_supported() in (True, False)
print(f"rank {rank} of {size}: all well")
hvd.shutdown()
assert not hvd.is_initialized()
