"""A small model, its data, and its training on one rank's share or on the joined batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import ringdance.keras as hvd

STEPS, ROWS = 20, 4
# Options of compile() for few steps: TensorFlow is then faster without a graph, and JAX with one.
FEW_STEPS = {"run_eagerly": keras.backend.backend() == "tensorflow"}

Weights = list[np.ndarray[Any, Any]]


def model(seed: int = 0, policy: Any = "float32") -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(16, activation="tanh", name="hidden", dtype=policy),
        keras.layers.Dense(1, name="out", dtype=policy),
    ])


def data(ranks: list[int], steps: int = STEPS, spoiled: dict[int, int] | None = None) -> tuple[Any, Any]:
    """Return these ranks' batches, joined per step. `spoiled` maps a step to the rank with a huge value."""
    everything = []
    for step in range(steps):
        for rank in ranks:
            x = np.random.default_rng([step, rank]).normal(size=(ROWS, 8)).astype("float32")
            y = np.sin(x.sum(axis=1, keepdims=True))
            if spoiled and spoiled.get(step) == rank:
                x[0, 0] = np.inf
            everything.append((x, y))
    return tuple(np.concatenate(parts) for parts in zip(*everything, strict=True))


def fit(optimizer: Any, ranks: list[int], seed: int = 0, **options: Any) -> Any:
    """Train a new model with `optimizer` for STEPS steps on the data of these ranks, and return it."""
    spoiled = options.pop("spoiled", None)
    net = model(seed, options.pop("policy", "float32"))
    net.compile(optimizer, "mse", **options.pop("compiled", {}))
    x, y = data(ranks, spoiled=spoiled)
    net.fit(x, y, batch_size=ROWS * len(ranks), shuffle=False, verbose=0, **options)
    return net


def by_rank_zero(work: Callable[[], Any]) -> Any:
    """Run `work` as one process would: on rank 0, while the others wait. Return its result on all ranks."""
    return hvd.broadcast_object(work() if hvd.rank() == 0 else None)


def alone(optimizer: Any, ranks: list[int], **options: Any) -> Weights:
    """Return the weights after one process has trained on the joined batches of these ranks."""
    weights: Weights = by_rank_zero(lambda: fit(optimizer, ranks, **options).get_weights())
    return weights


def far(one: Weights, other: Weights) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def same_on_all_ranks(weights: Weights) -> bool:
    return len(set(hvd.allgather_object(b"".join(weight.tobytes() for weight in weights)))) == 1


def number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
