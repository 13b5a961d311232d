"""Random programs of floating-point sums whose rounding reveals the order of summation.

``ringdance run ... python -m programs.sums COUNT`` (in the directory ``tests``) runs each program twice on
real ranks, with different delays. With RINGDANCE_DETERMINISTIC=1, all results must be bit-equal.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from typing import Any

import numpy as np

from ringdance.core.engine import Engine
from ringdance.core.exchange.arithmetic import dtype_named
from ringdance.core.request import Collective, ReduceOp
from ringdance.training import session
from ringdance.training.collectives import Call

__all__ = ["digest"]

SIZES = (1, 7, 100, 3_000, 20_000, 100_000)
DTYPES = ("float16", "bfloat16", "float32", "float64")
OPERATIONS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT, ReduceOp.ADASUM)


def _values(seed: str, size: int, dtype: str) -> np.ndarray[Any, Any]:
    chance = np.random.default_rng(list(seed.encode()))
    values = chance.normal(size=size) * np.exp2(chance.integers(-6, 6, size))
    return values.astype(dtype_named(dtype))


def digest(engine: Engine, seed: int, delays: int, steps: int = 3) -> str:
    """Run a program on this rank and return a digest of all result bits.

    Args:
        engine: This rank's engine.
        seed: Seed of the program and its values.
        delays: Seed of what must not matter: submission order, pauses, who starts first and who waits first.
    """
    program = random.Random(f"program {seed}")
    chance = random.Random(f"delays {delays} {engine.rank}")
    power_of_two = not engine.size & (engine.size - 1)
    calls = []
    for number in range(14):
        operation = program.choice(OPERATIONS if power_of_two else OPERATIONS[:3])
        dtype, size = program.choice(DTYPES), program.choice(SIZES)
        scale = program.choice((1.0, 1.0, 0.3))
        calls.append((f"t{number}", dtype, size, operation, scale, program.random() < 0.2))
    hasher = hashlib.sha256()
    for step in range(steps):
        works = {}
        for name, dtype, size, operation, scale, rows in chance.sample(calls, len(calls)):
            view = (_values(f"{seed} {step} {name} {engine.rank}", size, dtype),)
            wake = chance.random() < 0.7
            if rows and operation in (ReduceOp.SUM, ReduceOp.AVERAGE):
                call = Call(Collective.REDUCESCATTER, name, operation)
            else:
                call = Call(Collective.ALLREDUCE, name, operation, scale)
            works[name] = call.submit(engine, view, wake=wake)
            if chance.random() < 0.5:
                time.sleep(chance.choice((0.0, 0.0005, 0.003)))
        names = sorted(works)
        for name in chance.sample(names, len(names)):
            works[name].wait(60.0)
        for name in names:
            hasher.update(works[name].result[0].tobytes())
    return hasher.hexdigest()


def main() -> int:
    """Run programs on the ranks of this job. Return 1 if any result differs."""
    session.init()
    engine, wrong = session.engine(), 0
    for seed in range(int(sys.argv[1])):
        first, second = (digest(engine, seed, 1000 * turn + seed) for turn in (1, 2))
        if first != second:
            wrong += 1
            print(f"rank {engine.rank}: program {seed} gives different bits the second time", flush=True)
    if engine.rank == 0:
        print(f"{sys.argv[1]} programs twice on {engine.size} ranks, {len(set(engine.hosts))} hosts: "
              f"{'bit-equal' if not wrong else f'{wrong} differ'}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
