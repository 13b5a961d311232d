"""Random TensorFlow models and loops on several ranks, compared with one process that computes the mean.

They use tapes, eagerly and in functions, and sessions with the optimizers of ``tf.compat.v1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from random_training import (
    BLOCK,
    Program,
    batch,
    blocks,
    first_values,
    judge,
    make,
    predict,
    steps_of,
)

import ringdance.tensorflow as hvd

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
v1 = tf.compat.v1


class Operations:
    """The operations that ``predict`` needs."""

    concatenate, reshape, tanh, sum = tf.concat, tf.reshape, tf.tanh, tf.reduce_sum


def trained(program: Program) -> list[str]:
    return [name for name in first_values(program, 0) if name != "w0" or not program.frozen]


def halves(program: Program) -> list[list[str]]:
    names = trained(program)
    return [names[0::2], names[1::2]] if program.two else [names]


def loss_of(program: Program, values: dict[str, Any], given: Any, rank: int) -> Any:
    x, ids, y = given
    rows = tf.gather(values["table"], ids) if "table" in values else None
    predicted = predict(program, values, x, rows, rank, Operations)
    return tf.reduce_mean((predicted - y) ** 2)


def optimizer_of(program: Program) -> Any:
    if not program.loop:
        return {
            "sgd": v1.train.GradientDescentOptimizer(0.1), "momentum": v1.train.MomentumOptimizer(0.05, 0.9),
            "adam": v1.train.AdamOptimizer(0.01, epsilon=1e-3), "adagrad": v1.train.AdagradOptimizer(0.1),
        }[program.optimizer]
    return {
        "sgd": keras.optimizers.SGD(0.1), "momentum": keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": keras.optimizers.Adam(0.01, epsilon=1e-3), "adagrad": keras.optimizers.Adagrad(0.1),
    }[program.optimizer]


def options_of(program: Program) -> dict[str, Any]:
    return {
        "op": hvd.Sum if program.sum else hvd.Average, "gradient_predivide_factor": program.predivide,
        # If a rank refused to sum rows, the others would be left waiting.
        "sparse_as_dense": program.seed % 3 == 0 or (program.sparse == "mixed" and program.passes > 1),
    }


def all_steps(program: Program) -> list[int]:
    return [step for epoch in range(program.epochs) for step in steps_of(program, epoch)]


def train(program: Program, directory: Path) -> list[Any]:
    if not program.loop:
        return train_in_session(program)
    optimizers = [optimizer_of(program) for _ in halves(program)]
    values: dict[str, Any] = {}

    def step(*given: Any) -> None:
        for name, value in first_values(program, 0 if program.late else RANK).items():
            if name not in values:  # in the first step, if late
                values[name] = tf.Variable(value)
        with tf.GradientTape(persistent=program.two) as tape:
            loss = loss_of(program, values, given, RANK)
        for optimizer, names in zip(optimizers, halves(program), strict=True):
            variables = [values[name] for name in names]
            gradients = hvd.DistributedGradientTape(tape, **options_of(program)).gradient(loss, variables)
            pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
            optimizer.apply_gradients(pairs)

    if not program.late:
        values = {name: tf.Variable(value) for name, value in first_values(program, RANK).items()}
        hvd.broadcast_variables(values.values(), root_rank=0)
    run = step
    if program.compiled:
        for optimizer, names in zip(optimizers, halves(program), strict=True):
            if not program.late:
                optimizer.build([values[name] for name in names if has_gradient(program, name)])
        x, ids, y = (tf.TensorSpec([None, *item.shape[1:]], item.dtype) for item in batch(program, 0, RANK))
        run = tf.function(step, input_signature=[x, ids, y])
    for number in all_steps(program):
        run(*map(tf.constant, batch(program, number, RANK)))
    return [values[name].numpy() for name in first_values(program, 0)]


def has_gradient(program: Program, name: str) -> bool:
    return name != "unused" and (name != "branch" or RANK in program.only)


def train_in_session(program: Program) -> list[Any]:
    with tf.Graph().as_default():
        firsts = first_values(program, RANK)
        values = {name: v1.get_variable(name, initializer=first) for name, first in firsts.items()}
        x, ids, y = (v1.placeholder(item.dtype, [None, *item.shape[1:]]) for item in batch(program, 0, RANK))
        loss = loss_of(program, values, (x, ids, y), RANK)
        operations = []
        for index, names in enumerate(halves(program)):
            optimizer = hvd.DistributedOptimizer(
                optimizer_of(program), name=f"half{index}", backward_passes_per_step=program.passes,
                average_aggregated_gradients=program.average, **options_of(program),
            )
            pairs = optimizer.compute_gradients(loss, [values[name] for name in names])
            operations.append((optimizer, pairs))
        reduced = [value for _, pairs in operations for value, _ in pairs if value is not None]
        with tf.control_dependencies([dtype.op for dtype in reduced]):  # no step before all gradients exist
            step = tf.group(*[
                optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
                for optimizer, pairs in operations
            ])
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
            for number in all_steps(program):
                session.run(step, dict(zip((x, ids, y), batch(program, number, RANK), strict=True)))
            return session.run(list(values.values()))


def alone(program: Program) -> list[Any]:
    values = {name: tf.Variable(value) for name, value in first_values(program, 0).items()}
    optimizers = [optimizer_of(program) for _ in halves(program)]
    passes = 1 if program.loop else program.passes
    sums: dict[str, Any] = {}
    for count, number in enumerate(all_steps(program), 1):
        for rank in range(SIZE):
            with tf.GradientTape() as tape:
                loss = loss_of(program, values, batch(program, number, rank), rank)
            names = trained(program)
            result = tape.gradient(loss, [values[name] for name in names])
            for name, item in zip(names, result, strict=True):
                if item is not None:
                    share = (1.0 if program.sum else 1 / SIZE) * (1 / passes if program.average else 1.0)
                    sums.setdefault(name, []).append((item, share))
        if count % passes == 0:
            whole = {name: total_of(parts) for name, parts in sums.items()}
            for optimizer, names in zip(optimizers, halves(program), strict=True):
                optimizer.apply_gradients([(whole[name], values[name]) for name in names if name in whole])
            sums = {}
    return [value.numpy() for value in values.values()]


def total_of(parts: list[tuple[Any, float]]) -> Any:
    """Return the sum of gradients, as rows if all of them are rows."""
    total = sum(np.asarray(tf.convert_to_tensor(value)) * share for value, share in parts)
    if len(parts) == 1 and SIZE == 1:  # not exchanged: optimizers see a batch's repeated rows
        return parts[0][0]
    if not all(isinstance(value, tf.IndexedSlices) for value, _ in parts):
        return tf.constant(total, tf.float32)
    rows = np.unique(np.concatenate([np.asarray(value.indices) for value, _ in parts]))
    return tf.IndexedSlices(tf.constant(total[rows], tf.float32), tf.constant(rows), total.shape)


def refusal(program: Program) -> str:
    keeps_rows = program.sparse != "no" and not options_of(program)["sparse_as_dense"]
    sums = not program.loop and program.passes > 1
    if sums and keeps_rows:
        return "cannot sum IndexedSlices"
    if program.only and set(program.only) != set(range(SIZE)):
        return "gradients" if program.loop else "Mismatched"  # only some ranks have the slots, too
    return "gradients" if program.sparse == "mixed" and keeps_rows else ""


def run_one(program: Program, directory: Path) -> None:
    judge(program, lambda: train(program, directory), lambda: alone(program), refusal(program))


@pytest.mark.limit(600)
@pytest.mark.parametrize("first", blocks("TensorFlow"))
def test_programs(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + BLOCK):
        program = make(seed, SIZE)
        print(program, flush=True)
        run_one(program, tmp_path)
