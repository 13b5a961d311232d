"""A slow training without anything wrong: ``quiet_job.py MINUTES FACTOR``, where factor 1 is realistic.

At the start and in the middle, the ranks compile for 60 s and finish 4 s apart. Then there are steps of 8 s
that differ by up to 20% between ranks and between steps, fast steps, and every 20 steps an evaluation of 2
minutes on rank 0, which is marked. FACTOR shortens compilations and evaluations.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

import ringdance.numpy as hvd


def compute(seconds: float) -> None:
    """Use the CPU, but not all of it, because three ranks may share two cores with other programs."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(20_000))
        time.sleep(0.01)


def step(seconds: float) -> None:
    """Make a forward pass, and a backward pass that submits gradients as they are computed."""
    compute(0.4 * seconds)
    handles = []
    for layer in range(3):
        compute(0.2 * seconds)
        handles.append(hvd.allreduce(np.ones(10_000), name=f"gradient.{layer}", wait=False))
    for handle in handles:
        hvd.synchronize(handle)
    hvd.mark_step()  # optimizers call this themselves


def main() -> None:
    minutes, factor = float(sys.argv[1]), float(sys.argv[2])
    hvd.init()
    rank, chance = hvd.rank(), random.Random(hvd.rank())
    began, number = time.monotonic(), 0
    goes_on = np.ones(1)
    while goes_on[0]:
        if number % 60 == 0:
            compute(60 * factor + 4 * rank)  # a compilation
        if number % 20 == 5:
            if rank == 0:
                with hvd.pause_stall_check("evaluation"):
                    time.sleep(120 * factor)
            hvd.barrier()
        if number % 20 == 10:
            for _ in range(100):
                step(0.02)
        step(8 * chance.uniform(0.9, 1.1))
        number += 1
        mine = np.full(1, time.monotonic() - began < 60 * minutes)
        goes_on = hvd.broadcast(mine.astype(float), 0, name="goes on")
    print(f"rank {rank}: {number} steps", flush=True)


if __name__ == "__main__":
    main()
