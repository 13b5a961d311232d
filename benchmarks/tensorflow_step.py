"""What the exchange adds to a training step of TensorFlow: a tf.function with a DistributedGradientTape.

What: variables, a loss of which the gradient of each is the variable, and plain gradient descent, in one
``tf.function``. The identity step leaves the gradients as they are, and also applies the first only when all
are there; the others average them over the ranks: by ringdance, and by the collectives of TensorFlow's own
MultiWorkerMirroredStrategy. Beside it the same list is averaged from NumPy, in one call, in place. The
lists: 160 gradients of 1 KB, and the 161 gradients of ResNet-50 (25.6 M float32, 102 MB).

Why: a graph adds the cost of taking its tensors out and handing them back, for each tensor and each byte.

How to read: contestants alternate; times are those of the slowest rank. "added" is the step with exchange
minus the identity step; "/ NumPy" is that divided by the exchange from NumPy, "/ strategy" divided by what
the strategy's step adds: smaller is better.
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
    """Return TensorFlow's strategy for these ranks. It has to be made before TensorFlow computes anything."""
    import tensorflow as tf

    cluster = tf.train.ClusterSpec({"worker": addresses(job)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=job.rank, rpc_layer="grpc"
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)


def _step(shapes: Shapes, average: Average) -> Callable[[], None]:
    """Return a step; ``average`` gets the tape, the loss and the variables, and returns gradients."""
    import tensorflow as tf

    variables = [tf.Variable(tf.ones(shape)) for shape in shapes]
    scale = tf.Variable(2.0)  # a constant would be folded, and the gradient would be the variable itself

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = scale * tf.add_n([tf.nn.l2_loss(one) for one in variables])
        gradients = average(tape, loss, variables)
        with tf.control_dependencies(gradients):
            for one, gradient in zip(variables, gradients, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=one.handle, alpha=RATE, delta=gradient)

    return step


def _by_ringdance(tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
    import ringdance.tensorflow as hvd

    return hvd.DistributedGradientTape(tape).gradient(loss, variables)


def _by_strategy(tape: Any, loss: Any, variables: Sequence[Any]) -> Any:
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, variables))


def steps(shapes: Shapes, strategy: Any = None) -> dict[str, Callable[[], object]]:
    """Return one call for each contestant."""
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
    """Look once whether the exchanges of a graph average.

    Raises:
        RuntimeError: one does not.
    """
    import tensorflow as tf

    import ringdance.tensorflow as hvd

    compiled = tf.function(autograph=False)
    weight = tf.Variable(tf.fill((1000,), float(hvd.rank())))

    def gradient(average: Average) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        return average(tape, loss, [weight])[0]

    found = {EXCHANGE: compiled(lambda: gradient(_by_ringdance))()}
    if strategy is not None:
        found[STRATEGY] = compiled(lambda: strategy.run(lambda: gradient(_by_strategy)))()
    for name, result in found.items():
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
