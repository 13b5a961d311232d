"""All checks that need a GPU, in one command: tests, ResNet-50 and DDP, overlap, a killed rank.

What: the following parts in this order (``--parts`` selects), on two ranks. If there is only one GPU, they
share it (NCCL 2.30 or newer, ``NCCL_MULTI_RANK_GPU_ENABLE=1``). ``--framework`` selects PyTorch, JAX or Keras
on JAX.

- ``tests``: rank tests for collectives, gradients and the device path, with tensors on the GPU.
- ``alone``: ResNet-50 in bfloat16 on one rank, with the plain framework and with Ringdance: at least 0.99.
- ``ddp``: the same on two ranks, with torch's DDP over NCCL and with Ringdance: at least 1. With JAX, the
  peer is ``jax.distributed`` and ``pmean``, which needs two GPUs.
- ``gradients`` (JAX): the 161 gradients of ResNet-50 averaged in one compiled step: at most 12 ms on an H200.
- ``overlap``: the share of the communicator's time that overlaps computation.
- ``kill``: a rank is killed in the middle of a step. The other must fail with an error; the time is measured.

How to read: a table with a row for each part, and ``--json FILE``. The exit code is 1 if a part failed.
``--device cpu --width 8 --image 32`` runs everything on CPUs (PyTorch with gloo), to test the script.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import format_table, launch_environment

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "torch": ("tests", "alone", "ddp", "overlap", "kill"),
    "jax": ("tests", "alone", "ddp", "gradients", "overlap", "kill"),
    "keras-jax": ("tests", "alone", "kill"),
}
TESTS = {
    "torch": ("test_torch_collectives.py", "test_torch_gradients.py", "test_torch_device.py"),
    "jax": ("test_jax_collectives.py", "test_jax_training.py", "test_jax_flax.py", "test_jax_transforms.py"),
    "keras-jax": ("keras",),
}
SCRIPTS = {"torch": "gpu_check_torch.py", "jax": "gpu_check_jax.py", "keras-jax": "gpu_check_jax.py"}
BLOCKS, STEPS, WARM_UP = 10, 10, 12  # the first steps choose kernels and agree on the buckets
MARK = "::gpu-check::"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the ranks need."""
    parser.add_argument("--framework", choices=tuple(PARTS), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=64, help="images per rank (default: 64)")
    parser.add_argument("--image", type=int, default=224, help="height and width of an image (default: 224)")
    parser.add_argument("--width", type=int, default=64, help="width of the network (default: 64, ResNet-50)")


def main() -> int:
    """Run the parts, each in separate processes, and print their results."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_options(parser)
    parser.add_argument("--parts", nargs="+", metavar="PART")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    parts = options.parts or PARTS[options.framework]
    if unknown := set(parts) - set(PARTS[options.framework]):
        parser.error(f"--framework {options.framework} has no part {', '.join(sorted(unknown))}")
    results = {part: run_part(part, options) for part in parts}
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
        files = [str(ROOT / "tests/ranks" / name) for name in TESTS[given.framework]]
        command += ["-m", "pytest", "-q", "--maxfail=200", "--tb=short", "-m", "not slow", *files]
    else:
        command += [str(ROOT / "benchmarks" / SCRIPTS[given.framework]), part]
        for name in ("framework", "device", "batch", "image", "width"):
            command += [f"--{name}", str(getattr(given, name))]
    environ = launch_environment() | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TEST_DEVICE": given.device}
    if given.framework == "torch" and given.device == "cpu":
        environ |= {"RINGDANCE_CPU_OPERATIONS": "gloo", "RINGDANCE_OVERLAP": "on"}
    if given.framework != "torch":
        environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "KERAS_BACKEND": "jax", "TEST_DEVICE": "cpu"}
        environ |= {"JAX_PLATFORMS": "cpu"} if given.device == "cpu" else {}
    print(f"gpu_check: {part} ...", flush=True)
    begun = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
    seconds = time.monotonic() - begun
    marked = [line[len(MARK) :] for line in done.stdout.splitlines() if line.startswith(MARK)]
    if part == "kill":
        named = "RankLostError" in done.stderr or "killed by SIGKILL" in done.stderr
        if not named:
            print((done.stdout + done.stderr)[-8000:], file=sys.stderr)
        text = f"exited {seconds:.1f} s after its start, error names the rank: {'yes' if named else 'no'}"
        return {"passed": done.returncode != 0 and named, "text": text}
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


# For the scripts that run on the ranks.


def options_of_rank() -> argparse.Namespace:
    """Parse the command line of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    add_options(parser)
    return parser.parse_args()


def tell(hvd: Any, passed: bool, text: str, **figures: Any) -> None:
    """Print the result of this part, on rank 0."""
    if hvd.rank() == 0:
        print(MARK + json.dumps({"passed": passed, "text": text, **figures}), flush=True)


def free_port() -> int:
    """Return a port on which nothing is listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
