"""What the exchange adds to a training step of TensorFlow: a tf.function with a DistributedGradientTape.

What: variables, a loss of which the gradient of each is the variable, and plain gradient descent, in one
``tf.function``. The identity step leaves the gradients as they are, and also applies the first only when all
are there; the other averages them over the ranks. Beside it the same list is averaged from NumPy, in one
call, in place. The lists: 160 gradients of 1 KB, and the 161 gradients of ResNet-50 (25.6 M float32, 102 MB).

Why: a graph adds the cost of taking its tensors out and handing them back, for each tensor and each byte.

How to read: contestants alternate; times are those of the slowest rank. "added" is the step with exchange
minus the identity step; "/ NumPy" is that divided by the exchange from NumPy: smaller is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common import Report, alternate, ensure_ranks, milliseconds, parser, ratio, run_rank, timed
from shapes import resnet50

IDENTITY, EXCHANGE, NUMPY = "identity step", "step with exchange", "exchange from NumPy"
RATE = 1e-7


def steps(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], None]]:
    """Return one call for each contestant."""
    import tensorflow as tf

    import ringdance.numpy
    import ringdance.tensorflow as hvd

    def made(exchange: bool) -> Callable[[], None]:
        variables = [tf.Variable(tf.ones(shape)) for shape in shapes]

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(one * one) for one in variables])
            wrapped = hvd.DistributedGradientTape(tape) if exchange else tape
            gradients = wrapped.gradient(loss, variables)
            with tf.control_dependencies(gradients):
                for one, gradient in zip(variables, gradients, strict=True):
                    tf.raw_ops.ResourceApplyGradientDescent(var=one.handle, alpha=RATE, delta=gradient)

        return step

    arrays = [np.ones(shape, np.float32) for shape in shapes]
    return {
        IDENTITY: made(False),
        EXCHANGE: made(True),
        NUMPY: lambda: ringdance.numpy.grouped_allreduce_(arrays, name="benchmark") and None,
    }


def check() -> None:
    """Look once whether a graph's exchange averages.

    Raises:
        RuntimeError: it does not.
    """
    import tensorflow as tf

    import ringdance.tensorflow as hvd

    weight = tf.Variable(tf.fill((1000,), float(hvd.rank())))

    @tf.function
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        return hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0]

    if np.unique(gradient().numpy()).tolist() != [hvd.size() - 1.0]:
        raise RuntimeError("the gradients of a function are not averaged")


def show(report: Report, title: str, samples: dict[str, list[float]]) -> None:
    """Print a table of one list."""
    summaries = report.add(title, "s", samples)
    added = summaries[EXCHANGE].median - summaries[IDENTITY].median
    rows = [
        [name, *map(milliseconds, (one.median, one.p10, one.p90, one.least)), str(one.count)]
        for name, one in summaries.items()
    ]
    report.figure(title, "added, s", added)
    share = report.figure(title, "added / NumPy", added / summaries[NUMPY].median)
    report.table((title, "median ms", "p10", "p90", "min", "runs"), rows)
    report.say(f"added: {milliseconds(added)} ms; / NumPy: {ratio(share)}")


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "tensorflow_step.py", seconds=10)
    arguments = options.parse_args()
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        report = Report("exchange within a step of TensorFlow", job)
        report.opening()
        check()
        lists = {
            "160 gradients of 1 KB": [(256,)] * 160,
            "161 gradients of ResNet-50": [shape for _, shape in resnet50(backward=False)],
        }
        for title, shapes in lists.items():
            calls = {name: timed(call) for name, call in steps(shapes).items()}
            for call in calls.values():
                call()
            show(report, title, alternate(job, calls, arguments.seconds))
        report.write(arguments.json)

    run_rank(measure, ["ringdance.tensorflow"])


if __name__ == "__main__":
    main()
