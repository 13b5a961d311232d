"""Random Keras models and loops on several ranks, compared with one process that computes the mean itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from random_training import (
    BLOCK,
    ROWS_OF_TABLE,
    Program,
    batch,
    blocks,
    joined,
    judge,
    make,
    steps_of,
)

import ringdance.keras as hvd
from ringdance.keras.library import KERAS2, keras, ops

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BACKEND = keras.backend.backend()
layers = keras.layers
_compiled: dict[Any, Any] = {}  # compiled JAX functions


@keras.saving.register_keras_serializable("tests", "RandomNet")
class Net(keras.Model):
    """The model of a program, as one rank runs it."""

    def __init__(self, seed: int, rank: int, **options: Any) -> None:
        super().__init__(**options)
        self.given = {"seed": seed, "rank": rank}
        self.program = program = make(seed, SIZE)
        self.rank = rank
        self.table = layers.Embedding(ROWS_OF_TABLE, 3) if program.sparse != "no" else None
        for index in range(program.hidden):  # Keras on torch does not reset gradients of layers in a list
            setattr(self, f"dense{index}", layers.Dense(program.width, activation="tanh"))
        self.dense0.trainable = not program.frozen
        self.zlast = layers.Dense(1, dtype="float32")
        self.unused = layers.Dense(3) if program.unused else None
        self.branch = layers.Dense(program.width) if program.only else None
        if self.unused is not None:
            self.unused.build((None, 2))
        if self.branch is not None:
            self.branch.build((None, program.width))

    def get_config(self) -> dict[str, Any]:
        return self.given

    def call(self, inputs: Any, training: bool = False) -> Any:
        x, ids = inputs
        if self.table is not None:
            rows = self.table(ids)
            x = keras.layers.concatenate([x, keras.layers.Flatten()(rows)])
        for index in range(self.program.hidden):
            x = getattr(self, f"dense{index}")(x)
        if self.program.shared and self.program.hidden > 1:
            x = getattr(self, f"dense{self.program.hidden - 1}")(x)
        if self.branch is not None and self.rank in self.program.only:
            x = x + self.branch(x)
        result = self.zlast(x)
        if self.program.sparse == "mixed" and self.rank == 0:
            total = keras.backend.sum if KERAS2 else keras.ops.sum
            result = result + 0.01 * total(ops.cast(self.table.embeddings, "float32"))
        return result


@contextlib.contextmanager
def precision(program: Program) -> Iterator[None]:
    """Use float16 if the program asks for it."""
    keras.mixed_precision.set_global_policy("mixed_float16" if program.half else "float32")
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


def net_of(program: Program, rank: int, seed: int, late: bool = False) -> Any:
    keras.utils.set_random_seed(seed)
    net = Net(program.seed, rank)
    if not late:
        x, ids, _ = batch(program, 0, 0)
        net((x, ids))
    return net


def optimizer_of(program: Program) -> Any:
    options: dict[str, Any] = {"use_ema": program.ema, "ema_momentum": 0.9}
    clip = {"global": "global_clipnorm", "each": "clipnorm", "value": "clipvalue"}.get(program.clip)
    if clip:
        options[clip] = 0.02
    kinds = {
        "sgd": lambda: keras.optimizers.SGD(0.1, **options),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options),
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, **options),
        "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=1e-3, **options),
    }
    return kinds[program.optimizer]()


def gradients_of(net: Any, program: Program, step: int, rank: int, optimizer: Any) -> list[Any]:
    """Return the gradients of one rank's batch, computed by the framework itself."""
    x, ids, y = batch(program, step, rank)
    net.rank = rank
    scale = getattr(optimizer, "scale_loss", None) or (lambda loss: loss)
    if KERAS2 and program.half:
        scale = optimizer.get_scaled_loss
    loss_of = keras.losses.MeanSquaredError()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = scale(loss_of(y, net((x, ids), training=True)))
        return list(tape.gradient(loss, net.trainable_variables))
    variables = net.trainable_variables
    if BACKEND == "torch":
        import torch

        net.zero_grad()
        scale(loss_of(torch.tensor(y), net((torch.tensor(x), torch.tensor(ids)), training=True))).backward()
        return [variable.value.grad for variable in variables]
    import jax

    def compute(trainable: Any, other: Any, factor: Any, x: Any, ids: Any, y: Any) -> Any:
        predicted, _ = net.stateless_call(trainable, other, (x, ids), training=True)
        return loss_of(y, predicted) * factor

    if (net, rank) not in _compiled:
        _compiled[net, rank] = jax.jit(jax.grad(compute))
    others = [variable.value for variable in net.non_trainable_variables]
    return list(_compiled[net, rank]([v.value for v in variables], others, scale(1.0), x, ids, y))


def dense(gradient: Any) -> Any:
    if gradient is None or BACKEND != "tensorflow":
        return gradient.detach().clone() if BACKEND == "torch" and gradient is not None else gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def apply(optimizers: list[Any], gradients: list[Any], variables: list[Any]) -> None:
    """Make a step with one optimizer, or with two that have half of the variables each."""
    with contextlib.ExitStack() as stack:
        if BACKEND == "torch":
            import torch

            stack.enter_context(torch.no_grad())
        for place, optimizer in enumerate(optimizers):
            mine = slice(place, None, len(optimizers))
            if BACKEND == "jax":
                apply_in_jax(optimizer, gradients[mine], variables[mine])
            elif KERAS2:
                mine_given = gradients[mine]
                if hasattr(optimizer, "get_unscaled_gradients"):
                    mine_given = optimizer.get_unscaled_gradients(mine_given)
                optimizer.apply_gradients(list(zip(mine_given, variables[mine], strict=True)))
            else:
                optimizer.apply(gradients[mine], variables[mine])


def apply_in_jax(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    import jax

    if not optimizer.built:
        optimizer.build(variables)
    if optimizer not in _compiled:
        _compiled[optimizer] = jax.jit(optimizer.stateless_apply)
    trained, slots = _compiled[optimizer](
        [variable.value for variable in optimizer.variables], gradients, [v.value for v in variables]
    )
    for variable, value in zip([*variables, *optimizer.variables], [*trained, *slots], strict=True):
        variable.assign(value)


def train(program: Program, directory: Path) -> list[Any]:
    """Train this rank's part and return the weights."""
    late = program.late and (BACKEND == "tensorflow" or not program.loop)
    net = net_of(program, RANK, 7 if late else 7 + RANK, late)
    options = {
        "op": hvd.Sum if program.sum else hvd.Average, "gradient_predivide_factor": program.predivide,
        "backward_passes_per_step": program.passes, "average_aggregated_gradients": program.average,
        "sparse_as_dense": KERAS2 and program.passes > 1,  # Keras 2 cannot sum rows
    }
    if program.loop:
        return train_by_apply(program, net, options)
    net.compile(
        hvd.DistributedOptimizer(optimizer_of(program), **options), "mse",
        run_eagerly=BACKEND == "tensorflow" and not program.compiled,
    )
    for epochs in fits_of(program):
        if epochs[0]:
            path = directory / f"{program.seed}.keras"
            if RANK == 0:
                net.save(path)
            hvd.broadcast_object(None)
            net = hvd.load_model(path)
            net.rank = RANK

        def batches(epochs: Sequence[int] = epochs) -> Iterator[Any]:
            for epoch in epochs:
                for step in steps_of(program, epoch):
                    x, ids, y = batch(program, step, RANK)
                    yield (x, ids), y

        net.fit(
            batches(), steps_per_epoch=program.steps, epochs=len(epochs), verbose=0,
            callbacks=[] if epochs[0] else [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        )
    return net.get_weights()


def fits_of(program: Program) -> list[Sequence[int]]:
    """Return the epochs of each call of fit()."""
    every = range(program.epochs)
    return [[array] for array in every] if program.reload else [every]


def train_by_apply(program: Program, net: Any, options: dict[str, Any]) -> list[Any]:
    optimizers = [hvd.DistributedOptimizer(tensor, **options) for tensor in optimizers_of(program)]
    if net.built:
        hvd.broadcast_variables(net.variables, root_rank=0)
    for epoch in range(program.epochs):
        for step in steps_of(program, epoch):
            gradients = gradients_of(net, program, step, RANK, optimizers[0])
            apply(optimizers, gradients, net.trainable_variables)
    return net.get_weights()


def optimizers_of(program: Program) -> list[Any]:
    """Return plain optimizers, as a training loop uses them."""
    made = [optimizer_of(program) for _ in range(2 if program.two and not program.half else 1)]
    if program.half:
        return [keras.mixed_precision.LossScaleOptimizer(optimizer) for optimizer in made]
    return made


def alone(program: Program) -> list[Any]:
    """Train as one process that has all ranks' batches, and return the weights."""
    net = net_of(program, 0, 7)
    optimizers = optimizers_of(program) if program.loop else [optimizer_of(program)]
    if program.half and not program.loop:
        optimizers = [keras.mixed_precision.LossScaleOptimizer(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if program.passes > 1 and not KERAS2:
            inner.gradient_accumulation_steps = program.passes
    # Keras 3 averages over the passes. For Keras 2, they are summed here.
    times = (1 / program.passes if KERAS2 else 1.0) if program.average else 1.0 if KERAS2 else program.passes
    passes: list[Any] = []
    for epochs in fits_of(program):
        for step in [step for epoch in epochs for step in steps_of(program, epoch)]:
            every = [
                [dense(array) for array in gradients_of(net, program, step, rank, optimizers[0])]
                for rank in range(SIZE)
            ]
            whole = joined(program, every, lambda one, other: one + other)
            if KERAS2:
                passes.append(whole)
                if len(passes) < program.passes:
                    for optimizer in optimizers:
                        optimizer.iterations.assign_add(1)
                    continue
                whole = [None if part[0] is None else sum(part) for part in zip(*passes, strict=True)]
                passes = []
            apply(optimizers, [one if one is None else one * times for one in whole], net.trainable_variables)
        if program.ema and not program.loop:
            optimizers[0].finalize_variable_values(net.trainable_variables)
    return net.get_weights()


def refusal(program: Program) -> str:
    """Return the expected error text if the ranks' gradients do not match."""
    if BACKEND != "jax" and program.only and set(program.only) != set(range(SIZE)):
        return "gradients"
    # What Keras accumulates is dense. A user's LossScaleOptimizer reduces before accumulation.
    reduces_sums = program.passes > 1 and (KERAS2 or not (program.half and program.loop))
    return "gradients" if BACKEND == "tensorflow" and program.sparse == "mixed" and not reduces_sums else ""


def run_one(program: Program, directory: Path) -> None:
    """Run a program. `directory` is for files and is shared by the ranks."""
    if KERAS2 and program.half and program.loop and program.only:
        return  # its LossScaleOptimizer drops None before calling ours: a DeadlockError after half a minute
    keras.backend.clear_session()
    _compiled.clear()
    with precision(program):
        judge(program, lambda: train(program, directory), lambda: alone(program), refusal(program))


@pytest.mark.every_backend(daily=True)
@pytest.mark.limit(600)
@pytest.mark.parametrize("first", blocks(f"Keras on {BACKEND} {KERAS2}"))
def test_programs(first: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("random"))))
    for seed in range(first, first + BLOCK):
        program = make(seed, SIZE)
        print(program, flush=True)
        run_one(program, directory)
