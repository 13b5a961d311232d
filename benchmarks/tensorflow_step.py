"""The time that the exchange adds to a TensorFlow training step: a tf.function with DistributedGradientTape.

What: variables, a loss whose gradient with respect to each variable is proportional to it, and plain
gradient descent, in one ``tf.function``. The identity step leaves the gradients unchanged, but it also waits
until all exist before it applies the first. The other steps average them over the ranks: with ringdance, and
with the collectives of TensorFlow's own MultiWorkerMirroredStrategy. The same list is also averaged from
NumPy in place in one call. The lists: 160 gradients of 1 KB, and the 161 gradients of ResNet-50 (25.6 M
float32, 102 MB).

Why: a graph adds the cost of taking tensors out and handing them back, per tensor and per byte.

How to read: contestants alternate. Times are the slowest rank's. "added" is the step with exchange minus the
identity step. "/ NumPy" is "added" divided by the exchange from NumPy, "/ strategy" is "added" divided by the
time that the strategy's step adds. Smaller is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import Report, ensure_ranks, parser, run_rank
from steps import (
    EXCHANGE,
    IDENTITY,
    NUMPY,
    RATE,
    Shapes,
    add_options,
    addresses,
    from_numpy,
    keep_memory,
    measure,
)  # fmt: skip

STRATEGY = "strategy"

Average = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


def strategy_of(job: Any) -> Any:
    """Return TensorFlow's strategy for these ranks. Call this before TensorFlow computes anything."""
    import tensorflow as tf

    cluster = tf.train.ClusterSpec({"worker": addresses(job)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=job.rank, rpc_layer="grpc"
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)


def _step(shapes: Shapes, average: Average) -> Callable[[], None]:
    """Return a step. ``average`` receives the tape, the loss and the variables, and returns gradients."""
    import tensorflow as tf

    variables = [tf.Variable(tf.ones(shape)) for shape in shapes]
    scale = tf.Variable(2.0)  # a constant would be folded, making the gradient the variable itself

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = scale * tf.add_n([tf.nn.l2_loss(variable) for variable in variables])
        gradients = average(tape, loss, variables)
        with tf.control_dependencies(gradients):
            for variable, gradient in zip(variables, gradients, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=RATE, delta=gradient)

    return step


def _by_ringdance(tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
    import ringdance.tensorflow as hvd

    return hvd.DistributedGradientTape(tape).gradient(loss, variables)


def _by_strategy(tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, variables))


def steps(shapes: Shapes, strategy: Any = None) -> dict[str, Callable[[], object]]:
    """Return a call for each contestant."""
    import tensorflow as tf

    compiled = tf.function(autograph=False)
    calls: dict[str, Callable[[], object]] = {
        IDENTITY: compiled(_step(shapes, lambda tape, *rest: tape.gradient(*rest))),
        EXCHANGE: compiled(_step(shapes, _by_ringdance)),
        NUMPY: from_numpy(shapes),
    }
    if strategy is not None:
        theirs = _step(shapes, _by_strategy)
        calls[STRATEGY] = compiled(lambda: strategy.run(theirs))
    return calls


def check(strategy: Any) -> None:
    """Check once that the exchanges in a graph average.

    Raises:
        RuntimeError: An exchange does not average.
    """
    import tensorflow as tf

    import ringdance.tensorflow as hvd

    compiled = tf.function(autograph=False)
    weight = tf.Variable(tf.fill((1000,), float(hvd.rank())))

    def gradient(average: Average) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        return average(tape, loss, [weight])[0]

    results = {EXCHANGE: compiled(lambda: gradient(_by_ringdance))()}
    if strategy is not None:
        results[STRATEGY] = compiled(lambda: strategy.run(lambda: gradient(_by_strategy)))()
    for name, result in results.items():
        if np.unique(result.numpy()).tolist() != [hvd.size() - 1.0]:
            raise RuntimeError(f"{name}: the gradients of a function are not averaged")


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "tensorflow_step.py", seconds=10)
    add_options(options)
    arguments = options.parse_args()
    keep_memory()
    ensure_ranks(arguments)

    def run(job: Any) -> None:
        strategy = None if arguments.no_peer else strategy_of(job)
        report = Report("exchange within a step of TensorFlow", job)
        report.opening()
        check(strategy)
        measure(report, lambda shapes: steps(shapes, strategy), STRATEGY, arguments)
        report.write(arguments.json)

    run_rank(run, ["ringdance.tensorflow"])


if __name__ == "__main__":
    main()
