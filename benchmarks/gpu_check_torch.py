"""The parts of gpu_check.py that run on the ranks, for PyTorch."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check import BLOCKS, STEPS, WARM_UP, free_port, options_of_rank, tell

ROOT = Path(__file__).resolve().parents[1]


def set_up(given: argparse.Namespace) -> Any:
    """Join the job and return this rank's device."""
    import torch

    import ringdance.torch as hvd

    hvd.init()
    if given.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def stepper(given: argparse.Namespace, device: Any, how: str) -> Callable[[], None]:
    """Return a function that runs a training step. ``how`` is "plain", "ddp" or "ringdance"."""
    import torch

    import ringdance.torch as hvd

    sys.path.insert(0, str(ROOT / "src/ringdance/recipes/resnet50"))
    from train_torch import resnet50  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model: Any = resnet50(1000, given.width).to(device)
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if how == "ringdance":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    images = torch.randn(given.batch, 3, given.image, given.image, device=device)
    labels = torch.randint(0, 1000, (given.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def synchronize(device: Any) -> None:
    """Wait until the device has finished its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(given: argparse.Namespace, peer: str, least: float) -> None:
    """Alternate blocks of steps of a peer and of ours, and print the ratio of the medians."""
    import ringdance.torch as hvd

    device = set_up(given)
    if peer == "ddp":
        join_torch(device)
    steps = {how: stepper(given, device, how) for how in (peer, "ringdance")}
    times: dict[str, list[float]] = {how: [] for how in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for _ in range(BLOCKS):
        for how, step in steps.items():
            synchronize(device)
            hvd.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            synchronize(device)
            times[how].append((time.perf_counter() - begun) / STEPS)
    medians = {how: statistics.median(hvd.allgather_object(own)[0]) for how, own in times.items()}
    speed = medians[peer] / medians["ringdance"]
    text = ", ".join(f"{how} {given.batch / seconds:.1f} images/s/rank" for how, seconds in medians.items())
    text += f": {speed:.3f} of {peer} (at least {least:g})"
    tell(hvd, speed >= least, text, seconds=medians, ratio=speed)


def join_torch(device: Any) -> None:
    """Create torch.distributed's group for DDP."""
    import torch.distributed as dist

    import ringdance.torch as hvd

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = hvd.broadcast_object(free_port() if hvd.rank() == 0 else 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())


def overlap(given: argparse.Namespace) -> None:
    """Profile some steps. Prints the share of the communicator's kernel time that overlaps other kernels."""
    import torch

    import ringdance.torch as hvd

    device = set_up(given)
    step = stepper(given, device, "ringdance")
    for _ in range(WARM_UP):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            step()
        synchronize(device)
    kernels = [kernel for kernel in profile.events() if "CUDA" in str(kernel.device_type)]
    ours = [kernel.time_range for kernel in kernels if "nccl" in kernel.name.lower()]
    rest = [kernel.time_range for kernel in kernels if "nccl" not in kernel.name.lower()]
    others = sorted((kernel.start, kernel.end) for kernel in rest)
    total = sum(kernel.end - kernel.start for kernel in ours)
    beside = sum(covered(kernel.start, kernel.end, others) for kernel in ours)
    share = beside / total if total else 0.0
    if device.type == "cpu":
        tell(hvd, True, "a profile of the CPU has no kernels of a communicator")
    else:
        text = f"{total / STEPS / 1e3:.2f} ms of NCCL in a step, {share:.0%} of it overlaps others"
        tell(hvd, share > 0.5, text, share=share)


def covered(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Return how much of a span is covered by ``spans``, which are sorted by their start."""
    total, at = 0.0, start
    for first, last in spans:
        if last > at and first < end:
            total += min(last, end) - max(first, at)
            at = min(last, end)
    return total


def kill(given: argparse.Namespace) -> None:
    """Train. Rank 1 is killed in the middle of a step, and rank 0 must fail with an error."""
    import ringdance.torch as hvd

    device = set_up(given)
    step = stepper(given, device, "ringdance")
    for number in range(WARM_UP + 50):
        step()
        if number == WARM_UP and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        synchronize(device)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "alone": lambda given: compare(given, "plain", 0.99),
    "ddp": lambda given: compare(given, "ddp", 1.0),
    "overlap": overlap,
    "kill": kill,
}

if __name__ == "__main__":
    options = options_of_rank()
    PARTS[options.part](options)
