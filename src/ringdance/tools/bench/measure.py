"""Time training steps for ``ringdance bench train``, with and without exchanges, and with other libraries."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import ringdance.numpy
from ringdance.core.monitor.core_use import CoreUse
from ringdance.tools.plan.models import FORWARD
from ringdance.training import session

RATE = 1e-3
SINGLE, LOOKS = 12, 3
Step = Callable[[], Any]
Gradients = list[tuple[str, int, float]]
"""For each gradient: name, size in bytes, and seconds from the start of the step until it is ready."""


class Made(NamedTuple):
    """A model built with one of the frameworks, and the functions that run and measure it.

    Attributes:
        steps: Step function for each contestant. A call runs one training step and returns the loss.
        sizes: Name and size in bytes of each gradient, in forward order.
        ready: Measures when each gradient becomes ready, or None if the framework cannot report this.
        exchange: Takes gradient sizes in bytes, and returns a step function that only averages gradients of
            these sizes, all in a single group.
        gpu: True if the rank has a GPU.
    """

    steps: dict[str, Step]
    sizes: list[tuple[str, int]]
    ready: Callable[[], Gradients] | None = None
    exchange: Callable[[Sequence[int]], Step] | None = None
    gpu: bool = False


def batch_of(given: Mapping[str, Any], rank: int) -> tuple[Any, Any]:
    """Return a batch of synthetic samples and their labels. Each rank gets a different batch."""
    random, name, count, size = np.random.default_rng(rank), given["model"], given["batch"], given["image"]
    if name in ("deepfm", "bert-base"):
        from ringdance.tools.plan.torch_models import FIELDS, TABLE, WORDS

        width, below = (FIELDS, TABLE) if name == "deepfm" else (size, WORDS)
        return random.integers(0, below, (count, width)), random.integers(0, 2, count)
    shape = (784,) if name == "mlp" else (size, size, 3)
    labels = random.integers(0, 10 if name in ("mlp", "convnet") else 1000, count)
    return random.standard_normal((count, *shape), np.float32), labels


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """Train on synthetic samples. The contestants take turns, each for a block of steps.

    Args:
        given: Values of the options ``model``, ``framework``, ``batch``, ``image``, ``dtype``, ``against``,
            ``steps``, ``warmup`` and ``unit``.

    Returns:
        This rank's measurements: seconds per step by contestant and block, times of single steps without
        exchanges, gradients, seconds for the exchange alone, the host, its number of cores and their
        utilization, and the number of cores that this rank used.
    """
    hvd = ringdance.numpy
    made: Made = _MAKERS[given["framework"]](given)
    for step in made.steps.values():
        for _ in range(given["warmup"]):
            float(step())
    count = max(1, given["steps"] // 6)
    use, cpu, began = CoreUse(session.engine().local_pids), time.process_time(), time.perf_counter()
    blocks: dict[str, list[float]] = {name: [] for name in made.steps}
    say = print if hvd.rank() == 0 else lambda *words, **options: None
    say(f"{'step':>6}{given['unit'] + '/s per rank':>22}{'total':>12}{'loss':>10}", flush=True)
    for done in range(count, given["steps"] + count, count):
        for name, step in made.steps.items():
            seconds, loss = _block(step, count)
            blocks[name].append(seconds)
            if name == "ringdance":
                speed = given["batch"] / seconds
                say(f"{done:>6}{speed:>22,.1f}{speed * hvd.size():>12,.1f}{loss:>10.3f}", flush=True)
    single = [_block(made.steps["alone"], 1)[0] for _ in range(SINGLE)]
    used = (time.process_time() - cpu) / (time.perf_counter() - began)
    busy = use.share()
    gradients = made.ready() if made.ready else assumed(made.sizes, median(blocks["alone"]))
    # The sizes of sparse gradients differ between ranks, so all ranks use the sizes from rank 0.
    agreed = hvd.broadcast_object([nbytes for _, nbytes, _ in gradients], 0)
    exchange = (made.exchange or _by_numpy)(agreed)
    exchange()
    return {
        "host": socket.gethostname(), "cores": max(1, int(use.cores)), "gpu": made.gpu,
        "busy": busy, "used": used,
        "local_size": hvd.local_size(), "blocks": blocks, "single": single, "gradients": gradients,
        "assumed": made.ready is None, "exchange": median(_block(exchange, 1)[0] for _ in range(5)),
    }  # fmt: skip


def _block(step: Step, count: int) -> tuple[float, float]:
    """Run ``count`` steps after a barrier. Return the mean step time in seconds and the last loss."""
    ringdance.numpy.barrier()
    began = time.perf_counter()
    for _ in range(count):
        loss = step()
    last = float(loss)  # float() waits for the GPU to finish
    return (time.perf_counter() - began) / count, last


def assumed(sizes: Sequence[tuple[str, int]], step: float) -> Gradients:
    """Return gradients with assumed ready times: evenly spaced over the backward pass, last layer first."""
    pace = step * (1 - FORWARD) / len(sizes)
    ends = (step * FORWARD + pace * place for place in range(1, len(sizes) + 1))
    return [(name, nbytes, end) for (name, nbytes), end in zip(reversed(sizes), ends, strict=True)]


def _by_numpy(sizes: Sequence[int]) -> Step:
    arrays = [np.ones(nbytes // 4, np.float32) for nbytes in sizes]
    return lambda: ringdance.numpy.allreduce(arrays, "exchange alone", out=arrays) and 0.0


def _torch(given: Mapping[str, Any]) -> Made:
    import torch
    from torch.nn import functional

    import ringdance.torch as hvd
    from ringdance.tools.plan.torch_models import build

    hvd.init()
    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{hvd.local_rank() % torch.cuda.device_count()}" if gpu else "cpu")
    x, y = (torch.from_numpy(array).to(device) for array in batch_of(given, hvd.rank()))
    x = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x
    half = torch.autocast(device.type, torch.bfloat16, enabled=given["dtype"] == "bfloat16")

    def step_of(model: Any, optimizer: Any) -> Step:
        def step() -> Any:
            optimizer.zero_grad()
            with half:
                logits = model(x).float()
            if logits.shape[1] == 1:
                loss: Any = functional.binary_cross_entropy_with_logits(logits[:, 0], y.float())
            else:
                loss = functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    steps, models = {}, {}
    for name in ("ringdance", "alone", *given["against"]):
        torch.manual_seed(0)
        model: Any = build(given["model"], given["image"]).to(device)
        models[name] = model
        optimizer: Any = torch.optim.SGD(model.parameters(), RATE)
        if name == "ddp":
            torch.distributed.init_process_group("nccl" if gpu else "gloo")
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif name == "ringdance":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        steps[name] = step_of(model, optimizer)

    def exchange(sizes: Sequence[int]) -> Step:
        tensors = [torch.ones(nbytes // 4, device=device) for nbytes in sizes]
        return lambda: hvd.grouped_allreduce_(tensors, name="exchange alone")[0].sum()

    return Made(steps, [], partial(_ready, models["alone"], steps["alone"], gpu), exchange, gpu)


def _ready(model: Any, step: Step, gpu: bool) -> Gradients:
    """Return the gradients with the median times at which they are computed, as measured by hooks."""
    import torch

    seen_at: dict[str, tuple[int, list[Any]]] = {}

    def now() -> Any:
        if not gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seen(name: str, parameter: Any) -> None:
        gradient = parameter.grad
        parts = (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        seen_at.setdefault(name, (nbytes, []))[1].append(now())

    hooks = [
        p.register_post_accumulate_grad_hook(partial(seen, name)) for name, p in model.named_parameters()
    ]
    starts = []
    for _ in range(LOOKS):
        starts.append(now())
        float(step())
    for hook in hooks:
        hook.remove()

    def passed(start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if gpu else end - start

    rows = ((name, nbytes, median(map(passed, starts, ends))) for name, (nbytes, ends) in seen_at.items())
    return sorted(rows, key=lambda row: row[2])


def _model(given: Mapping[str, Any]) -> Any:
    """Build a Keras model that outputs logits. Its initial weights are the same on all ranks."""
    import keras
    from keras import layers

    name, size = given["model"], given["image"]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16" if given["dtype"] == "bfloat16" else "float32")
    dense = partial(layers.Dense, activation="relu")
    conv = partial(layers.Conv2D, kernel_size=3, padding="same", activation="relu")
    if name == "mlp":
        return keras.Sequential([keras.Input((784,)), dense(512), dense(512), layers.Dense(10)])
    if name == "convnet":
        return keras.Sequential([
            keras.Input((size, size, 3)), conv(32), layers.MaxPooling2D(), conv(64), conv(64),
            layers.MaxPooling2D(), layers.Flatten(), dense(2048), layers.Dense(10),
        ])  # fmt: skip
    known = {"resnet50": "ResNet50", "vgg16": "VGG16", "inception_v3": "InceptionV3"}
    make = getattr(keras.applications, known[name])
    return make(weights=None, input_shape=(size, size, 3), classifier_activation=None)


def _sizes(model: Any) -> list[tuple[str, int]]:
    return [(variable.path, 4 * int(np.prod(variable.shape))) for variable in model.trainable_variables]


def _keras(given: Mapping[str, Any]) -> Made:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import ringdance.keras as hvd

    hvd.init()
    import keras

    x, y = batch_of(given, hvd.rank())
    steps: dict[str, Step] = {}
    for name in ("ringdance", "alone"):
        model, optimizer = _model(given), keras.optimizers.SGD(RATE)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(hvd.DistributedOptimizer(optimizer) if name == "ringdance" else optimizer, loss)
        steps[name] = partial(model.train_on_batch, x, y)
    return Made(steps, _sizes(model))


def _tensorflow(given: Mapping[str, Any]) -> Made:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    import ringdance.tensorflow as hvd

    hvd.init()
    x, y = (tf.constant(array) for array in batch_of(given, hvd.rank()))

    def step_of(name: str, model: Any) -> Step:
        variables = [variable.value for variable in model.trainable_variables]

        def step() -> Any:
            with tf.GradientTape() as tape:
                logits = tf.cast(model(x, training=True), tf.float32)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            averaged = hvd.DistributedGradientTape(tape) if name == "ringdance" else tape
            gradients = averaged.gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=RATE, delta=gradient)
            return loss

        return tf.function(step, autograph=False)

    models = {name: _model(given) for name in ("ringdance", "alone")}
    return Made({name: step_of(name, model) for name, model in models.items()}, _sizes(models["alone"]))


def _jax(given: Mapping[str, Any]) -> Made:
    os.environ["KERAS_BACKEND"] = "jax"
    import ringdance.jax as hvd

    hvd.init()
    import jax
    import optax

    x, y = (jax.numpy.asarray(array) for array in batch_of(given, hvd.rank()))
    sgd, steps = optax.sgd(RATE), {}

    def step_of(model: Any, tx: Any) -> Step:
        def loss_of(weights: Any, others: Any, x: Any, y: Any) -> Any:
            logits, others = model.stateless_call(weights, others, x, training=True)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), y).mean()
            return loss, others

        @partial(jax.jit, donate_argnums=(0, 1, 2))
        def update(weights: Any, others: Any, state: Any, x: Any, y: Any) -> Any:
            (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others, x, y)
            updates, state = tx.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), others, state, loss

        weights = [variable.value for variable in model.trainable_variables]
        now = [weights, [var.value for var in model.non_trainable_variables], tx.init(weights)]

        def step() -> Any:
            *now[:], loss = jax.block_until_ready(update(*now, x, y))
            return loss

        return step

    for name, tx in (("ringdance", hvd.distributed(sgd)), ("alone", sgd)):
        model = _model(given)
        steps[name] = step_of(model, tx)
    return Made(steps, _sizes(model))


_MAKERS = {"torch": _torch, "keras": _keras, "tensorflow": _tensorflow, "jax": _jax}
