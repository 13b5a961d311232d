"""All checks that need a GPU, in one command: tests, ResNet-50 and DDP, overlap, a killed rank.

What: the following parts in this order (``--parts`` selects), on two ranks. If there is only one GPU, they
share it (NCCL 2.30 or newer, ``NCCL_MULTI_RANK_GPU_ENABLE=1``).

- ``tests``: rank tests for collectives, gradients and the device path, with tensors on the GPU.
- ``alone``: ResNet-50 in bfloat16 on one rank, plain torch and ``DistributedOptimizer``: at least 0.99.
- ``ddp``: the same on two ranks, torch's DDP over NCCL and ``DistributedOptimizer``: at least 1.
- ``overlap``: the share of the communicator's time that overlaps computation, from a profile.
- ``kill``: a rank is killed in the middle of a step. The other must fail with an error; the time is measured.

How to read: a table with a row for each part, and ``--json FILE``. The exit code is 1 if a part failed.
``--device cpu --width 8 --image 32`` runs everything on CPUs with gloo, to test the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import format_table, launch_environment

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("collectives", "gradients", "device")
PARTS = ("tests", "alone", "ddp", "overlap", "kill")
BLOCKS, STEPS, WARM_UP = 10, 10, 12  # the first steps choose kernels and agree on the buckets


def main() -> int:
    """Run the parts, each in separate processes, and print their results."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=64, help="images per rank (default 64)")
    parser.add_argument("--image", type=int, default=224, help="side of an image (default 224)")
    parser.add_argument("--width", type=int, default=64, help="width of the net (default 64: ResNet-50)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank-part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_part:
        RANKS[options.rank_part](options)
        return 0
    results = {part: run_part(part, options) for part in options.parts}
    rows = [[part, "yes" if result["passed"] else "NO", result["text"]] for part, result in results.items()]
    print(format_table(("part", "passed", "figures"), rows))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["passed"] for result in results.values()) else 1


def run_part(part: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a part. Returns whether it passed, and its results."""
    ranks = 1 if part == "alone" else 2
    command = [sys.executable, "-m", "ringdance", "run", "--no-prefix", "-np", str(ranks), sys.executable]
    if part == "tests":
        files = [str(ROOT / f"tests/ranks/test_torch_{name}.py") for name in TESTS]
        command += ["-m", "pytest", "-q", "--maxfail=200", "--tb=short", *files]
    else:
        command += [__file__, "--rank-part", part, "--device", given.device, "--batch", str(given.batch)]
        command += ["--image", str(given.image), "--width", str(given.width)]
    environ = launch_environment() | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TEST_DEVICE": given.device}
    if given.device == "cpu":
        environ |= {"RINGDANCE_CPU_OPERATIONS": "gloo", "RINGDANCE_OVERLAP": "on"}
    print(f"gpu_check: {part} ...", flush=True)
    begun = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    seconds = time.monotonic() - begun
    marked = [line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)]
    if part == "kill":
        told = "RankLostError" in done.stderr or "killed by SIGKILL" in done.stderr
        if not told:
            print((done.stdout + done.stderr)[-8000:], file=sys.stderr)
        return {"passed": done.returncode != 0 and told, "text": f"ended after {seconds:.1f} s, told: {told}"}
    if part == "tests":
        if done.returncode:
            print(done.stdout[-8000:] + done.stderr[-2000:], file=sys.stderr)
        lines = [line for line in done.stdout.splitlines() if "passed" in line or "failed" in line]
        return {"passed": done.returncode == 0, "text": "; ".join(lines[-2:])}
    if done.returncode or not marked:
        print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
        return {"passed": False, "text": f"exit code {done.returncode}: see above"}
    result: dict[str, Any] = json.loads(marked[-1])
    return result


# -- in a rank ------------------------------------------------------------------------------------

MARK = "::gpu-check::"


def tell(passed: bool, text: str, **figures: Any) -> None:
    """Print the result of this part, on rank 0."""
    import ringdance.torch as hvd

    if hvd.rank() == 0:
        print(MARK + json.dumps({"passed": passed, "text": text, **figures}), flush=True)


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
    tell(speed >= least, f"{text}: {speed:.3f} of {peer} (at least {least:g})", seconds=medians, ratio=speed)


def join_torch(device: Any) -> None:
    """Create torch.distributed's group for DDP."""
    import torch.distributed as dist

    import ringdance.torch as hvd

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = hvd.broadcast_object(free_port() if hvd.rank() == 0 else 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())


def free_port() -> int:
    """Return a port on which nothing is listening."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def overlap(given: argparse.Namespace) -> None:
    """Profile some steps. Prints the share of the communicator's kernel time that overlaps other kernels."""
    import torch

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
        tell(True, "a profile of the CPU has no kernels of a communicator")
    else:
        text = f"{total / STEPS / 1e3:.2f} ms of NCCL in a step, {share:.0%} of it overlaps others"
        tell(share > 0.5, text, share=share)


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


RANKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "alone": lambda given: compare(given, "plain", 0.99),
    "ddp": lambda given: compare(given, "ddp", 1.0),
    "overlap": overlap,
    "kill": kill,
}


if __name__ == "__main__":
    sys.exit(main())
