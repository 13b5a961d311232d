"""Random JAX models and loops on several ranks, compared with one process that computes the mean itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_training import (
    BLOCK,
    Program,
    batch,
    blocks,
    first_values,
    joined,
    judge,
    make,
    predict,
    steps_of,
)

import ringdance.jax as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def transformation(program: Program, names: list[str]) -> Any:
    """Return the gradient transformation of one optimizer."""
    clip = {
        "no": optax.identity(), "global": optax.clip_by_global_norm(0.05), "each": optax.clip(0.02),
        "value": optax.adaptive_grad_clip(0.05),
    }[program.clip]
    kind = {
        "sgd": optax.sgd(0.1), "momentum": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(0.01, eps=1e-3),
        "adagrad": optax.adagrad(0.1),
    }[program.optimizer]
    made = optax.chain(clip, optax.ema(0.9) if program.ema else optax.identity(), kind)
    if program.half and program.infinite >= 0:
        made = optax.apply_if_finite(made, 3)
    if program.frozen and "w0" in names:
        labels = {name: "frozen" if name == "w0" else "trained" for name in names}
        made = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": made}, labels)
    return made


def halves(program: Program) -> list[list[str]]:
    """Return the variable names of each optimizer."""
    names = list(first_values(program, 0))
    return [names[0::2], names[1::2]] if program.two else [names]


def loss_of(program: Program, rank: int) -> Any:
    wide = jnp.bfloat16 if program.half else jnp.float32

    def loss(values: dict[str, Any], x: Any, ids: Any, y: Any) -> Any:
        values = {name: value.astype(wide) for name, value in values.items()}
        rows = values["table"][ids] if "table" in values else None
        predicted = predict(program, values, x.astype(wide), rows, rank, jnp)
        return jnp.mean((predicted.astype(jnp.float32) - y) ** 2)

    return loss


def start(program: Program, transformations: list[Any], rank: int) -> tuple[Any, Any]:
    values = {name: jnp.asarray(value) for name, value in first_values(program, rank).items()}
    return values, [
        item.init({name: values[name] for name in names})
        for item, names in zip(transformations, halves(program), strict=True)
    ]


def updated(
    program: Program, transformations: list[Any], gradients: Any, values: Any, states: Any
) -> tuple[Any, Any]:
    """Make one step with all optimizers."""
    after, values = [], dict(values)
    for item, names, state in zip(transformations, halves(program), states, strict=True):
        mine = {name: values[name] for name in names}
        updates, state = item.update({name: gradients[name] for name in names}, state, mine)
        values |= optax.apply_updates(mine, updates)
        after.append(state)
    return values, after


def weights(values: dict[str, Any]) -> list[Any]:
    return [np.asarray(values[name]) for name in sorted(values)]  # JAX sorts them when it traces


def train(program: Program, directory: Path) -> list[Any]:
    def made() -> list[Any]:
        op = hvd.Sum if program.sum else hvd.Average
        return [hvd.distributed(transformation(program, names), op=op) for names in halves(program)]

    transformations = made()
    values, states = start(program, transformations, RANK)
    values, states = hvd.broadcast_parameters((values, states), root_rank=0)

    def step(carry: Any, given: Any) -> Any:
        compute = jax.grad(loss_of(program, RANK))
        each = [compute(carry[0], *[part[number] for part in given]) for number in range(program.passes)]
        share = 1 / program.passes if program.average else 1.0
        total = jax.tree.map(lambda *parts: sum(parts) * share, *each)
        return updated(program, transformations, total, *carry), None

    eager = program.seed % 8 == 0  # then JAX compiles each operation
    run = step if eager else jax.jit(step)
    for epoch in range(program.epochs):
        if epoch and program.reload:
            path = directory / f"{program.seed}.pickle"
            if RANK == 0:
                path.write_bytes(pickle.dumps(jax.device_get((values, states))))
            hvd.broadcast_object(None)
            values, states = jax.tree.map(jnp.asarray, pickle.loads(path.read_bytes()))
            transformations = made()
            run = step if eager else jax.jit(step)
        batches = [batch(program, item, RANK) for item in steps_of(program, epoch)]
        updates = [
            [jnp.stack(parts) for parts in zip(*batches[first : first + program.passes], strict=True)]
            for first in range(0, len(batches), program.passes)
        ]
        if program.loop:
            stacked = [jnp.stack(parts) for parts in zip(*updates, strict=True)]
            (values, states), _ = jax.lax.scan(step, (values, states), stacked)
        else:
            for update in updates:
                (values, states), _ = run((values, states), update)
    return weights(values)


def alone(program: Program) -> list[Any]:
    transformations = [transformation(program, names) for names in halves(program)]
    values, states = start(program, transformations, 0)
    computed = [jax.jit(jax.grad(loss_of(program, rank))) for rank in range(SIZE)]
    update = jax.jit(lambda *given: updated(program, transformations, *given))
    passes: list[Any] = []
    for step in [step for epoch in range(program.epochs) for step in steps_of(program, epoch)]:
        every = [computed[rank](values, *batch(program, step, rank)) for rank in range(SIZE)]
        leaves = joined(program, [list(array.values()) for array in every], lambda one, other: one + other)
        passes.append(dict(zip(every[0], leaves, strict=True)))
        if len(passes) == program.passes:
            share = 1 / program.passes if program.average else 1.0
            total = jax.tree.map(lambda *parts, share=share: sum(parts) * share, *passes)
            values, states = update(total, values, states)
            passes = []
    return weights(values)


def refusal(program: Program) -> str:
    return ""


def run_one(program: Program, directory: Path) -> None:
    judge(program, lambda: train(program, directory), lambda: alone(program), refusal(program))


@pytest.mark.limit(600)
@pytest.mark.parametrize("first", blocks("JAX"))
def test_programs(first: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("random"))))
    for seed in range(first, first + BLOCK):
        program = make(seed, SIZE)
        print(program, flush=True)
        run_one(program, directory)
