"""Random models and training loops: their parameters, their data, and how their outcome is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sampled import sampled

from ringdance.errors import RingdanceError
from ringdance.training.objects import allgather_object

COUNT, BLOCK = 201, 1
FEATURES, ROWS_OF_TABLE = 5, 7

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Program:
    """A model and its training.

    Attributes:
        seed: Determines all other attributes, the weights and the data.
        width: Width of the hidden layers.
        hidden: Number of hidden layers.
        shared: If True, the last hidden layer is used twice.
        frozen: If True, the first hidden layer is not trained.
        unused: If True, the model has a layer that no rank uses.
        late: If True, layers create their variables in the first step.
        only: Ranks that use an additional branch. Empty if there is no branch.
        sparse: Kind of embedding table: "no", "rows", or "mixed" if rank 0 also uses the whole table.
        optimizer: Name of the optimizer.
        clip: Gradient clipping: "no", or one of Keras's three ways.
        ema: If True, weights are averaged over the steps.
        passes: Number of accumulated gradients.
        average: If True, the accumulated gradients are averaged, otherwise summed.
        sum: If True, gradients are summed over ranks.
        predivide: Factor as in DistributedOptimizer.
        half: If True, uses float16 with loss scaling, or bfloat16.
        compiled: If True, the step is compiled.
        two: If True, each of two optimizers has half of the variables.
        loop: The framework's own training loop, or the user's.
        reload: If True, everything is saved and loaded between epochs.
        epochs: Number of epochs.
        steps: Steps per epoch.
        infinite: Step in which one rank's gradients are not finite, if there is loss scaling.
    """

    seed: int
    width: int
    hidden: int
    shared: bool
    frozen: bool
    unused: bool
    late: bool
    only: tuple[int, ...]
    sparse: str
    optimizer: str
    clip: str
    ema: bool
    passes: int
    average: bool
    sum: bool
    predivide: float
    half: bool
    compiled: bool
    two: bool
    loop: bool
    reload: bool
    epochs: int
    steps: int
    infinite: int


def blocks(name: str) -> list[Any]:
    """Return the first seed of each block of programs as parameters. One block is due each day."""
    return sampled(name, range(0, COUNT, BLOCK), 1)


def make(seed: int, size: int) -> Program:
    """Draw the program for a seed. It is equal on all ranks."""
    draw = random.Random(f"{seed} of training")
    some: Callable[[float], bool] = lambda part: draw.random() < part  # noqa: E731
    passes, summed = draw.choice([1, 1, 1, 2, 3]), some(0.25)
    ranks = tuple(sorted(draw.sample(range(size), draw.randint(1, max(1, size - 1)))))
    epochs = draw.choice([1, 2, 2])
    return Program(
        seed, width=draw.randint(3, 6), hidden=draw.randint(1, 3), shared=some(0.3), frozen=some(0.25),
        unused=some(0.25), late=some(0.25), only=ranks if some(0.15) and size > 1 else (),
        sparse=draw.choice(["no", "no", "no", "rows", "rows", "mixed" if some(0.5) and size > 1 else "rows"]),
        optimizer=draw.choice(["sgd", "momentum", "adam", "adagrad"]),
        clip=draw.choice(["no", "no", "global", "each", "value"]), ema=some(0.2), passes=passes,
        average=some(0.5), sum=summed, predivide=draw.choice([1.0, 1.0, 4.0]) if not summed else 1.0,
        half=some(0.2), compiled=some(0.5), two=some(0.25), loop=some(0.4), reload=epochs > 1 and some(0.4),
        epochs=epochs, steps=draw.randint(2, 4) * passes, infinite=draw.choice([-1, -1, -1, 0, 1, 2]),
    )  # fmt: skip


def first_values(program: Program, seed: int) -> dict[str, Array]:
    """Return the model's initial variables by name."""
    drawn, inputs = np.random.default_rng([program.seed, seed]), FEATURES
    shapes: dict[str, tuple[int, ...]] = {}
    if program.sparse != "no":
        shapes["table"] = (ROWS_OF_TABLE, 3)
        inputs += 2 * 3
    for index in range(program.hidden):
        shapes |= {f"w{index}": (inputs, program.width), f"b{index}": (program.width,)}
        inputs = program.width
    if program.only:
        shapes["branch"] = (inputs, inputs)
    if program.unused:
        shapes["unused"] = (2, 3)
    shapes |= {"w": (inputs, 1), "b": (1,)}
    return {name: drawn.normal(0, 0.5, shape).astype("float32") for name, shape in shapes.items()}


def predict(program: Program, values: dict[str, Any], x: Any, rows: Any, rank: int, xp: Any) -> Any:
    """Return the model's prediction.

    Args:
        program: Program with the model.
        values: Variables of the model.
        x: Features.
        rows: Rows of the embedding table, shape (n, 2, 3), or None.
        rank: Rank, which determines whether the branch is used.
        xp: Array module with ``concatenate``, ``reshape``, ``tanh`` and ``sum``.
    """
    if rows is not None:
        x = xp.concatenate([x, xp.reshape(rows, (-1, 6))], 1)
    for index in range(program.hidden):
        x = xp.tanh(x @ values[f"w{index}"] + values[f"b{index}"])
    last = program.hidden - 1
    if program.shared and program.hidden > 1:
        x = xp.tanh(x @ values[f"w{last}"] + values[f"b{last}"])
    if rank in program.only:
        x = x + x @ values["branch"]
    result = x @ values["w"] + values["b"]
    if program.sparse == "mixed" and rank == 0:
        result = result + 0.01 * xp.sum(values["table"])
    return result


def batch(program: Program, step: int, rank: int) -> tuple[Array, Array, Array]:
    """Return inputs, rows of the table, and targets. The number of samples differs between ranks."""
    drawn = np.random.default_rng([program.seed, step, rank])
    rows = 3 + rank
    x = drawn.normal(size=(rows, FEATURES)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    if program.half and (step, rank) == (program.infinite, program.infinite % 2):
        x[0, 0] = np.inf
    return x, drawn.integers(0, ROWS_OF_TABLE, (rows, 2)), y


def steps_of(program: Program, epoch: int) -> range:
    """Return the step numbers of an epoch."""
    return range(epoch * program.steps, (epoch + 1) * program.steps)


def joined(program: Program, gradients: Sequence[Sequence[Any]], add: Callable[[Any, Any], Any]) -> list[Any]:
    """Combine all ranks' gradients, dense or None, as one process would compute them."""
    results = []
    for parts in zip(*gradients, strict=True):
        if parts[0] is None:
            results.append(None)
            continue
        total = parts[0]
        for addend in parts[1:]:
            total = add(total, addend)
        results.append(total if program.sum else total / len(parts))
    return results


def judge(
    program: Program, train: Callable[[], list[Array]], alone: Callable[[], list[Array]], refused: str
) -> None:
    """Train on all ranks and alone, and compare the weights; or check that all ranks refuse alike.

    Args:
        program: Program, shown in messages.
        train: Trains this rank's part and returns the weights.
        alone: Trains as a single process would.
        refused: Text that each rank's error must contain, or empty if there must not be an error.
    """
    weights: list[Array] = []
    problem = ""
    try:
        weights = train()
    except Exception as error:
        rows_stay = program.sparse == "mixed" and "Mismatched gradients" in str(error)  # TensorFlow's error
        if not refused and not rows_stay and not isinstance(error, RingdanceError):
            raise
        problem = f"{type(error).__name__}: {error}"
    everywhere = allgather_object((problem, b"".join(array.tobytes() for array in weights)), "judge")
    if refused:
        said = [text for text, _ in everywhere]
        assert all(refused in text for text in said), f"{program}\nexpected {refused!r} on all ranks: {said}"
        return
    if program.sparse == "mixed" and all("Mismatched gradients" in text for text, _ in everywhere):
        return  # here, accumulated rows stay sparse
    assert not any(text for text, _ in everywhere), f"{program}\n{[text for text, _ in everywhere]}"
    assert len({weights for _, weights in everywhere}) == 1, f"{program}\nranks have different weights"
    expected = alone()
    tolerance = 2e-2 if program.half else 2e-4
    assert len(weights) == len(expected)
    for index, (own, other) in enumerate(zip(weights, expected, strict=True)):
        np.testing.assert_allclose(
            own.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance,
            err_msg=f"{program}\nvariable {index}",
        )
