"""Everything that only a GPU can show, in one call: tests, ResNet-50 beside DDP, overlap, a killed rank.

What, in this order, each part by itself (``--parts``), on two ranks that share a GPU where there is only
one (NCCL 2.30 or newer, ``NCCL_MULTI_RANK_GPU_ENABLE=1``):

- ``tests``: the rank tests of collectives, gradients and the device's path, with tensors on the GPU;
- ``alone``: ResNet-50 in bfloat16 on one rank, plain torch beside ``DistributedOptimizer``: at least 0.99;
- ``ddp``: the same on two ranks, torch's DDP over NCCL beside ``DistributedOptimizer``: at least 1;
- ``overlap``: of a profile, which share of the communicator's time lies beside computation;
- ``kill``: a rank is killed in the middle of a step: the other one ends with an error, and in which time.

How to read: a table with a line for each part, and ``--json FILE``. Exit code 1 if one has failed.
``--device cpu --width 8 --image 32`` runs all of it on CPUs with gloo, which shows that the script works.
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
BLOCKS, STEPS, WARM_UP = 10, 10, 12  # the first steps choose kernels, and agree on the buckets


def main() -> int:
    """Run the parts, each in processes of its own, and print what they found."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=64, help="images of a rank (default 64)")
    parser.add_argument("--image", type=int, default=224, help="side of an image (default 224)")
    parser.add_argument("--width", type=int, default=64, help="width of the net (default 64: ResNet-50)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank-part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_part:
        RANKS[given.rank_part](given)
        return 0
    found = {part: run_part(part, given) for part in given.parts}
    rows = [[part, "yes" if one["passed"] else "NO", one["text"]] for part, one in found.items()]
    print(format_table(("part", "passed", "figures"), rows))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one["passed"] for one in found.values()) else 1


def run_part(part: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a part; return whether it passed, and its figures."""
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
    """Join the job; return this rank's device."""
    import torch

    import ringdance.torch as hvd

    hvd.init()
    if given.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def stepper(given: argparse.Namespace, device: Any, how: str) -> Callable[[], None]:
    """Return a function that makes a training step: "plain", "ddp" or "ringdance"."""
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
    """Wait until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(given: argparse.Namespace, peer: str, least: float) -> None:
    """Alternate blocks of steps of a peer and of ours; tell the ratio of the medians."""
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
    medians = {how: statistics.median(hvd.allgather_object(found)[0]) for how, found in times.items()}
    speed = medians[peer] / medians["ringdance"]
    text = ", ".join(f"{how} {given.batch / one:.1f} images/s a rank" for how, one in medians.items())
    tell(speed >= least, f"{text}: {speed:.3f} of {peer} (at least {least:g})", seconds=medians, ratio=speed)


def join_torch(device: Any) -> None:
    """Make torch.distributed's group, for DDP."""
    import torch.distributed as dist

    import ringdance.torch as hvd

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = hvd.broadcast_object(free_port() if hvd.rank() == 0 else 0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())


def free_port() -> int:
    """Return a port that nothing listens on."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def overlap(given: argparse.Namespace) -> None:
    """Profile some steps; tell which share of the communicator's kernels ran beside others."""
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
    kernels = [one for one in profile.events() if "CUDA" in str(one.device_type)]
    ours = [one.time_range for one in kernels if "nccl" in one.name.lower()]
    rest = [one.time_range for one in kernels if "nccl" not in one.name.lower()]
    others = sorted((one.start, one.end) for one in rest)
    total = sum(one.end - one.start for one in ours)
    beside = sum(covered(one.start, one.end, others) for one in ours)
    share = beside / total if total else 0.0
    if device.type == "cpu":
        tell(True, "a profile of the CPU has no kernels of a communicator")
    else:
        text = f"{total / STEPS / 1e3:.2f} ms of NCCL in a step, {share:.0%} of it beside computation"
        tell(share > 0.5, text, share=share)


def covered(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Return how much of a span others cover; they are sorted by their start."""
    total, at = 0.0, start
    for first, last in spans:
        if last > at and first < end:
            total += min(last, end) - max(first, at)
            at = min(last, end)
    return total


def kill(given: argparse.Namespace) -> None:
    """Train; rank 1 is killed in the middle of a step, and rank 0 is to end in an error."""
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
