"""The parts of gpu_check.py that run on the ranks, for JAX and Keras on JAX."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpu_check import BLOCKS, STEPS, WARM_UP, free_port, options_of_rank, tell
from shapes import resnet50 as resnet50_shapes

import ringdance.jax as hvd

Step = Callable[[], Any]  # Runs one step and returns an array that depends on it.


def set_up(given: argparse.Namespace, connected: bool = False) -> None:
    """Join the job, with one device per rank. If ``connected``, JAX sees the devices of all ranks."""
    import jax

    on_cpu = given.device == "cpu"
    hvd.init()
    if connected:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = hvd.broadcast_object(f"127.0.0.1:{free_port()}" if hvd.rank() == 0 else "")
        own = [0 if on_cpu else hvd.local_rank()]
        jax.distributed.initialize(address, hvd.size(), hvd.rank(), local_device_ids=own)
    elif not on_cpu:
        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank() % count_gpus()))


def flax_net(width: int) -> Any:
    """Return ResNet-50 in bfloat16, as a Flax module."""
    import jax.numpy as jnp
    from flax import linen

    norm = partial(linen.BatchNorm, use_running_average=False, momentum=0.9, dtype=jnp.bfloat16)
    conv = partial(linen.Conv, use_bias=False, dtype=jnp.bfloat16)

    class Net(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(norm()(conv(width, (7, 7), 2)(x)))
            x = linen.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, blocks in enumerate((3, 4, 6, 3)):
                features = width * 2**stage
                for block in range(blocks):
                    strides = 2 if stage and not block else 1
                    y = linen.relu(norm()(conv(features, (1, 1))(x)))
                    y = linen.relu(norm()(conv(features, (3, 3), strides)(y)))
                    y = norm(scale_init=linen.initializers.zeros)(conv(4 * features, (1, 1))(y))
                    if x.shape != y.shape:
                        x = norm()(conv(4 * features, (1, 1), strides)(x))
                    x = linen.relu(x + y)
            return linen.Dense(1000, dtype=jnp.float32)(x.mean((1, 2)))

    return Net()


def flax_step(given: argparse.Namespace, how: str) -> Step:
    """Return a training step. ``how`` is "plain", "ringdance" or "pmean" (over the devices of all ranks)."""
    import jax
    import jax.numpy as jnp
    import optax

    net = flax_net(given.width)
    images = jax.random.normal(jax.random.key(0), (given.batch, given.image, given.image, 3))
    labels = jax.random.randint(jax.random.key(1), (given.batch,), 0, 1000)
    tx = optax.sgd(0.01, momentum=0.9)
    if how == "ringdance":
        tx = hvd.distributed(tx)
    variables = jax.jit(net.init)(jax.random.key(2), images)
    params, stats = variables["params"], variables["batch_stats"]

    def loss(params: Any, stats: Any, images: Any, labels: Any) -> Any:
        logits, changed = net.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), changed["batch_stats"]

    def train(state: Any, images: Any, labels: Any) -> Any:
        params, stats, moments = state
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params, stats, images, labels)
        if how == "pmean":
            gradients, stats = jax.lax.pmean((gradients, stats), "ranks")
        updates, moments = tx.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), stats, moments), jnp.reshape(value, 1)

    state = (params, stats, tx.init(params))
    if how == "pmean":
        train, state, images, labels = across_ranks(train, state, images, labels)
    compiled = jax.jit(train, donate_argnums=0)

    def step() -> Any:
        nonlocal state
        state, value = compiled(state, images, labels)
        return value

    return step


def across_ranks(train: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any, Any]:
    """Return a step on one device of each rank, and its arguments as arrays on all of these devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    own = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([own[rank] for rank in range(hvd.size())], "ranks")
    whole, split = PartitionSpec(), PartitionSpec("ranks")

    def spread(array: Any, spec: Any) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), np.asarray(array))

    spread_step = jax.shard_map(
        train, mesh=mesh, in_specs=(whole, split, split), out_specs=(whole, split), check_vma=False
    )
    return spread_step, jax.tree.map(lambda leaf: spread(leaf, whole), state), spread(images, split), spread(
        labels, split
    )


def keras_step(given: argparse.Namespace, how: str) -> Step:
    """Return a function that fits one batch with Keras. ``how`` is "plain" or "ringdance"."""
    import keras
    import numpy as np

    import ringdance.keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(given.image, given.image, 3))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if how == "ringdance":
        optimizer = ringdance.keras.DistributedOptimizer(optimizer)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    images = np.random.default_rng(0).random((given.batch, given.image, given.image, 3), np.float32)
    labels = np.arange(given.batch) % 1000
    return lambda: model.train_on_batch(images, labels)


def times_of(steps: dict[str, Step]) -> dict[str, float]:
    """Return the median time of each step on rank 0, in seconds. The steps alternate in blocks."""
    import jax

    times: dict[str, list[float]] = {how: [] for how in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(step())
    for _ in range(BLOCKS):
        for how, step in steps.items():
            hvd.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                value = step()
            jax.block_until_ready(value)
            times[how].append((time.perf_counter() - begun) / STEPS)
    return {how: statistics.median(hvd.allgather_object(own)[0]) for how, own in times.items()}


def compare(given: argparse.Namespace, peer: str, least: float) -> None:
    """Compare a training step with a peer's."""
    make = keras_step if given.framework == "keras-jax" else flax_step
    medians = times_of({how: make(given, how) for how in (peer, "ringdance")})
    speed = medians[peer] / medians["ringdance"]
    text = ", ".join(f"{how} {given.batch / seconds:.1f} images/s/rank" for how, seconds in medians.items())
    text += f": {speed:.3f} of {peer} (at least {least:g})"
    tell(hvd, speed >= least, text, seconds=medians, ratio=speed)


def alone(given: argparse.Namespace) -> None:
    """Compare with the plain framework on one rank."""
    set_up(given)
    compare(given, "plain", 0.99)


def ddp(given: argparse.Namespace) -> None:
    """Compare with pmean over the devices of all ranks."""
    if given.device == "cuda" and count_gpus() < 2:
        hvd.init()
        tell(hvd, True, "not measured: jax.distributed needs a GPU for each rank")
        return
    set_up(given, connected=True)
    compare(given, "pmean", 1.0)


def count_gpus() -> int:
    """Return the number of GPUs, without starting JAX."""
    from ringdance.core.transport.nccl import Nccl

    return Nccl().device_count()


def averaged(average: Callable[[Sequence[Any]], Sequence[Any]], shapes: Sequence[Any]) -> Step:
    """Return a step of gradient descent whose gradients are the parameters, averaged over the ranks."""
    import jax
    import jax.numpy as jnp

    def train(parameters: list[Any]) -> list[Any]:
        gradients = jax.lax.optimization_barrier([2.0 * each for each in parameters])
        gradients = jax.lax.optimization_barrier(list(average(gradients)))
        return [each - 0.01 * gradient for each, gradient in zip(parameters, gradients, strict=True)]

    compiled = jax.jit(train, donate_argnums=0)
    parameters = [jnp.ones(shape, jnp.float32) for shape in shapes]

    def step() -> Any:
        nonlocal parameters
        parameters = compiled(parameters)
        return parameters[0]

    return step


def gradients(given: argparse.Namespace) -> None:
    """Measure the time that averaging ResNet-50's gradients adds to a compiled step."""
    set_up(given)
    shapes = [shape for _, shape in resnet50_shapes()]
    steps = {
        "identity": averaged(lambda arrays: arrays, shapes),
        "ringdance": averaged(partial(hvd.grouped_allreduce, op=hvd.Average), shapes),
    }
    medians = times_of(steps)
    took = medians["ringdance"] * 1e3
    text = f"a step takes {took:.2f} ms (at most 12), without exchange {medians['identity'] * 1e3:.2f} ms"
    tell(hvd, took <= 12 or given.device == "cpu", text, seconds=medians)


def overlap(given: argparse.Namespace) -> None:
    """Compare a program that exchanges and computes with programs that do one of them."""
    import jax
    import jax.numpy as jnp

    set_up(given)
    size = 4096 if given.device == "cuda" else 256
    data, matrix = jnp.ones(25_000_000), jnp.ones((size, size), jnp.bfloat16)

    def exchange(data: Any) -> Any:
        return hvd.allreduce(data, op=hvd.Average, name="overlap")

    def compute(matrix: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, value: matrix @ value / size, matrix)

    both = jax.jit(lambda data, matrix: (exchange(data), compute(matrix), exchange(data[:1000])))
    one, other = jax.jit(exchange), jax.jit(compute)
    medians = times_of({
        "exchange": lambda: one(data), "compute": lambda: other(matrix), "both": lambda: both(data, matrix),
    })  # fmt: skip
    alone_ms, compute_ms, both_ms = (medians[how] * 1e3 for how in ("exchange", "compute", "both"))
    share = (alone_ms + compute_ms - both_ms) / min(alone_ms, compute_ms)
    text = f"exchange {alone_ms:.2f} ms, computation {compute_ms:.2f} ms, both {both_ms:.2f} ms: {share:.0%}"
    tell(hvd, share > 0.5 or given.device == "cpu", text, share=share)


def kill(given: argparse.Namespace) -> None:
    """Train. Rank 1 is killed in the middle of a step, and rank 0 must fail with an error."""
    import jax

    set_up(given)
    step = (keras_step if given.framework == "keras-jax" else flax_step)(given, "ringdance")
    for number in range(WARM_UP + 50):
        value = step()
        if number == WARM_UP and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        jax.block_until_ready(value)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "alone": alone, "ddp": ddp, "gradients": gradients, "overlap": overlap, "kill": kill,
}  # fmt: skip

if __name__ == "__main__":
    options = options_of_rank()
    PARTS[options.part](options)
