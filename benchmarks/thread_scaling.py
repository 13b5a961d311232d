"""Images per second of the ResNet-50 recipe: two ranks with one thread, or one process with two threads.

What: the recipe in normal use, on synthetic images and, with --data, on a data set written by `ringdance data
prepare` (including decoding threads). Both forms have the same global batch. They run in turn, in separate
processes. The first line of each run's table, which includes the warm-up, does not count.

Why: one rank per core must not cost more than it gains. The goal is at least 95% of the single process.

How to read: "ranks / threads" is the ratio of the medians over all runs. "pairs" is the ratio for each two
consecutive runs, which shows how much the machine varies.

example: python benchmarks/thread_scaling.py --data /data/photographs-prepared --runs 3 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from itertools import chain
from pathlib import Path

from common import about_machine, busy_cores, format_table, launch_environment, ratio

RANKS, THREADS = "2 ranks of 1 thread", "1 process of 2 threads"
# A row of the recipe's table: epoch, step, learning rate, loss, top-1, images/s, per rank, share of waiting.
LINE = re.compile(r"^\s*[\d.]+\s+(\d+)\s+[\d.e+-]+\s+[\d.]+\s+[\d.]+%\s+([\d.,]+)\s+[\d.,]+\s+[\d.]+%")


def recipe() -> Path:
    """Return the recipe's file in the installed package."""
    import ringdance.recipes.resnet50 as package

    return Path(package.__file__).with_name("train_torch.py")


def speeds(form: str, given: argparse.Namespace, source: list[str]) -> list[float]:
    """Run the recipe once. Returns the images/s in each row of its table except the first."""
    ranks, threads = (2, 1) if form == RANKS else (1, 2)
    command = [
        sys.executable, "-m", "ringdance", "run", "--no-prefix", "-np", str(ranks),
        "-x", f"OMP_NUM_THREADS={threads}", sys.executable, str(recipe()), "--preset", "laptop", *source,
        "--batch-size", str(given.batch // ranks), "--image-size", str(given.image_size),
        "--width", str(given.width), "--threads", str(threads), "--steps", str(given.steps * given.lines),
        "--log-every", str(given.steps), "--evaluate-every", "0",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=launch_environment(), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    matches = [LINE.match(line) for line in done.stdout.splitlines()]
    # Skip rows that end early because of a short last batch in an epoch.
    values = [float(row[2].replace(",", "")) for row in matches if row and int(row[1]) % given.steps == 0]
    if done.returncode or len(values) < 2:
        raise SystemExit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}")
    return values[1:]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--data", metavar="DIR", help="a prepared data set; without it, only synthetic images")
    add("--runs", type=int, default=2, help="runs of each form (default 2)")
    add("--lines", type=int, default=4, help="rows of the recipe's table per run (default 4)")
    add("--steps", type=int, default=3, help="steps per row (default 3)")
    add("--batch", type=int, default=32, help="images per step on all ranks together (default 32)")
    add("--image-size", type=int, default=224)
    add("--width", type=int, default=64, help="channels of the first stage (default 64: ResNet-50)")
    add("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    arguments = options.parse_args()
    busy = busy_cores(0.5)
    print(f"thread_scaling: {os.cpu_count()} cores, batch {arguments.batch}, {arguments.image_size} pixels")
    if busy is not None and busy > 0.1:
        print(f"NOTE: {busy:.2f} cores are busy with other programs. Do not trust single results")
    sources = {"synthetic": ["--synthetic", "--synthetic-images", "100000"]}
    if arguments.data:
        sources["data"] = ["--data", arguments.data]
    rows, results = [], []
    for name, source in sources.items():
        measured: dict[str, list[list[float]]] = {RANKS: [], THREADS: []}
        for number in range(arguments.runs):  # A B, B A, ...: slow changes affect both
            for form in (RANKS, THREADS) if number % 2 else (THREADS, RANKS):
                measured[form].append(speeds(form, arguments, source))
        medians = {form: statistics.median(chain.from_iterable(runs)) for form, runs in measured.items()}
        pairs = [
            statistics.median(ranks) / statistics.median(threads)
            for ranks, threads in zip(measured[RANKS], measured[THREADS], strict=True)
        ]
        share = medians[RANKS] / medians[THREADS]
        shown = ", ".join(ratio(pair) for pair in pairs)
        rows.append([name, f"{medians[RANKS]:.2f}", f"{medians[THREADS]:.2f}", ratio(share), shown])
        results.append({"images": name, "images_per_second": measured, "ratio": share, "pairs": pairs})
    print(format_table(["images/s", RANKS, THREADS, "ranks / threads", "pairs"], rows))
    if arguments.json:
        content = {"benchmark": "thread_scaling", "arguments": sys.argv[1:], "results": results}
        arguments.json.write_text(json.dumps(content | {"about": about_machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
