"""Uses of the wrapped optimizer beyond the plain loop. Results do not depend on the number of processes."""

import argparse

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn, optim

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--batch-size", type=int, default=60, help="of all processes together")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-model", default="./optimizers.pt")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
images, labels = digits(args.data_dir, train=True).tensors


def network():
    torch.manual_seed(20 + hvd.rank())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def batches(first=0):
    for step in range(first, first + args.steps):
        batch = slice(step * args.batch_size + hvd.rank(), (step + 1) * args.batch_size, hvd.size())
        yield images[batch], labels[batch]


def distributed(optimizer, model, **options):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def parameter_groups():
    """Different options for biases, a scheduler on the wrapped optimizer, and gradients set to None."""
    model = network()
    optimizer = distributed(optim.SGD([
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 0.4},
    ], lr=0.1, momentum=0.9, nesterov=True), model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for x, y in batches():
        optimizer.zero_grad(set_to_none=True)
        assert all(one.grad is None for one in model.parameters())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert isinstance(optimizer, optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert [round(rate, 6) for rate in scheduler.get_last_lr()] == [0.025, 0.1]
    return model


def scheduler_before():
    """Create the scheduler for the plain optimizer, which is wrapped afterwards."""
    model = network()
    plain = optim.SGD(model.parameters(), lr=0.3)
    scheduler = optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0 / (1 + step))
    optimizer = distributed(plain, model)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.3 / (1 + args.steps)) < 1e-9
    return model


def adam_resumed():
    """Save Adam's state and load it into a new optimizer that is then wrapped. Only rank 0 has the state."""
    model = network()
    optimizer = distributed(optim.Adam(model.parameters(), lr=0.01), model)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    saved = model.state_dict(), optimizer.state_dict()
    model = network()
    plain = optim.Adam(model.parameters(), lr=0.5)
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
        plain.load_state_dict(saved[1])
    optimizer = distributed(plain, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    for x, y in batches(first=args.steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    step = int(next(iter(optimizer.state.values()))["step"])
    assert step == 2 * args.steps, f"rank {hvd.rank()}: Adam has made {step} steps"
    return model


def closures():
    """Make steps with a closure that computes the gradients."""
    model = network()
    optimizer = distributed(optim.SGD(model.parameters(), lr=0.2), model)
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert torch.isfinite(loss)
    return model


def accumulated():
    """Make two backward passes per step, later four."""
    model = network()
    optimizer = distributed(optim.SGD(model.parameters(), lr=0.2), model, backward_passes_per_step=2)
    passes = 2
    for step, (x, y) in enumerate(batches()):
        if step == args.steps // 2:
            passes = 5
            optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for part, wanted in zip(x.chunk(passes), y.chunk(passes), strict=True):
            (F.cross_entropy(model(part), wanted) / passes).backward()
        optimizer.step()
    return model


def plateau():
    """Use a scheduler that depends on a metric, which is equal on all ranks."""
    model = network()
    optimizer = distributed(optim.AdamW(model.parameters(), lr=0.02), model, compression=hvd.Compression.none)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step(hvd.allreduce(loss.detach(), name="plateau").item())
    return model


def two_models():
    """Train two models with an optimizer each, like a generator and its critic."""
    one, two = network(), network()
    optimizers = [
        hvd.DistributedOptimizer(optim.RMSprop(model.parameters(), lr=0.005),
                                 named_parameters=model.named_parameters(prefix=prefix))
        for model, prefix in ((one, "one"), (two, "two"))
    ]
    for x, y in batches():
        optimizers[0].zero_grad()
        first = one(x)
        F.cross_entropy(first, y).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (F.mse_loss(two(x), first.detach()) + 0.1 * one(x).square().mean()).backward()
        optimizers[1].step()
    return nn.ModuleList([one, two])


def frozen():
    """Freeze layers at first, and pass no names."""
    model = network()
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    optimizer = hvd.DistributedOptimizer(optim.SGD(model.parameters(), lr=0.3))
    start = model[1].weight.clone()
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(start, model[1].weight)
    return model


results = {}
WAYS = (parameter_groups, scheduler_before, adam_resumed, closures, accumulated, plateau, two_models, frozen)
for way in WAYS:
    model = way()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    alike = torch.equal(hvd.broadcast(mine, root_rank=0), mine)
    assert alike, f"rank {hvd.rank()} differs after {way.__name__}"
    results[way.__name__] = model.state_dict()
print(f"rank {hvd.rank()}: {len(results)} ways")
if hvd.rank() == 0:
    torch.save(results, args.save_model)
