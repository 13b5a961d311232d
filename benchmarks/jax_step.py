"""The time that the exchange adds to a JAX training step: a compiled step with ``ringdance.jax``.

What: parameters, a loss whose gradient with respect to each parameter is proportional to it, and plain
gradient descent, in one ``jit`` that works in place (donated parameters). The identity step leaves the
gradients unchanged, but like a real model it has them all in memory before it applies the first. The other
steps average them over the ranks: with ringdance, and with JAX's own collectives over gloo (``pmean`` in
``shard_map`` over the devices of all processes). The same list is also averaged from NumPy in place in one
call. The lists: 160 gradients of 1 KB, and the 161 gradients of ResNet-50 (25.6 M float32, 102 MB).

Why: a compiled program adds the cost of handing over its arrays, per array and per byte.

How to read: contestants alternate. Times are the slowest rank's. "added" is the step with exchange minus the
identity step. "/ NumPy" is "added" divided by the exchange from NumPy, "/ gloo" is "added" divided by the
time that the step with JAX's own collectives adds. Smaller is better.
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

GLOO = "gloo"

Average = Callable[[Sequence[Any]], Sequence[Any]]


def connect(job: Any) -> None:
    """Let JAX see the devices of all ranks. Call this before JAX computes anything."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = addresses(job)[0]
    jax.distributed.initialize(
        coordinator_address=address, num_processes=job.size, process_id=job.rank, local_device_ids=[0]
    )


def _step(average: Average) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function from parameters to parameters."""
    import jax

    def loss(parameters: Sequence[Any]) -> Any:
        return sum((each * each).sum() for each in parameters)

    def step(parameters: Sequence[Any]) -> list[Any]:
        gradients = jax.lax.optimization_barrier(jax.grad(loss)(parameters))
        gradients = jax.lax.optimization_barrier(average(gradients))
        return [weight - RATE * gradient for weight, gradient in zip(parameters, gradients, strict=True)]

    return step


def _as_they_are(gradients: Sequence[Any]) -> Any:
    """Return the gradients from a loop that never runs. XLA cannot know this and keeps them in memory."""
    import jax

    small = gradients[1].reshape(-1)[0]

    def body(state: tuple[int, Any]) -> tuple[int, Any]:
        return state[0] + 1, [array + array for array in state[1]]

    return jax.lax.while_loop(lambda state: (state[0] < 1) & (small < 0), body, (0, list(gradients)))[1]


def _by_ringdance(gradients: Sequence[Any]) -> Any:
    import ringdance.jax as hvd

    return hvd.grouped_allreduce(list(gradients), name="step", op=hvd.Average)


def _by_gloo(gradients: Sequence[Any]) -> Any:
    import jax

    return jax.lax.pmean(list(gradients), "ranks")


def _mesh() -> Any:
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))


def _over_ranks(function: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """Return the function for arrays whose first dimension is distributed over the ranks, one row each."""
    import jax

    rows = jax.sharding.PartitionSpec("ranks")
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=_mesh(), in_specs=(rows,), out_specs=rows)
    from jax.experimental.shard_map import shard_map  # JAX before 0.6

    return shard_map(function, mesh=_mesh(), in_specs=(rows,), out_specs=rows)


def _laid_over_ranks(rows: Sequence[Any]) -> list[Any]:
    """Return distributed arrays in which ``rows`` are this rank's rows."""
    import jax

    mesh = _mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    return [
        jax.make_array_from_single_device_arrays((mesh.size, *row.shape), sharding, [row[None]])
        for row in rows
    ]


def _repeated(step: Any, parameters: list[Any]) -> Callable[[], None]:
    """Return a call that runs a step on the result of the previous one, and waits for it."""
    import jax

    state = [parameters]

    def call() -> None:
        state[0] = jax.block_until_ready(step(state[0]))

    return call


def _ones(shapes: Shapes, value: float = 1.0) -> list[Any]:
    import jax

    device = jax.local_devices()[0]
    return [jax.device_put(np.full(shape, value, np.float32), device) for shape in shapes]


def steps(shapes: Shapes, peer: bool = True) -> dict[str, Callable[[], object]]:
    """Return a call for each contestant."""
    import jax

    def compiled(function: Any) -> Any:
        return jax.jit(function, donate_argnums=0)

    calls: dict[str, Callable[[], object]] = {
        IDENTITY: _repeated(compiled(_step(_as_they_are)), _ones(shapes)),
        EXCHANGE: _repeated(compiled(_step(_by_ringdance)), _ones(shapes)),
        NUMPY: from_numpy(shapes),
    }
    if peer:
        calls[GLOO] = _repeated(compiled(_over_ranks(_step(_by_gloo))), _laid_over_ranks(_ones(shapes)))
    return calls


def check(job: Any, peer: bool) -> None:
    """Check once that the exchanges average.

    Raises:
        RuntimeError: An exchange does not average.
    """
    import jax

    own = _ones([(1000,)], float(job.rank))
    results = {EXCHANGE: jax.jit(_by_ringdance)(own)[0]}
    if peer:
        # Adding the row makes the result consist of rows, too.
        average = jax.jit(_over_ranks(lambda rows: [_by_gloo(rows)[0] + 0 * rows[0]]))
        results[GLOO] = average(_laid_over_ranks(own))[0].addressable_data(0)
    for name, result in results.items():
        if np.unique(np.asarray(result)).tolist() != [(job.size - 1) / 2]:
            raise RuntimeError(f"{name}: gradients are not averaged")


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "jax_step.py", seconds=10)
    add_options(options)
    arguments = options.parse_args()
    keep_memory()
    ensure_ranks(arguments)

    def run(job: Any) -> None:
        if not arguments.no_peer:
            connect(job)
        report = Report("exchange within a step of JAX", job)
        report.opening()
        check(job, not arguments.no_peer)
        measure(report, lambda shapes: steps(shapes, not arguments.no_peer), GLOO, arguments)
        report.write(arguments.json)

    run_rank(run, ["ringdance.jax"])


if __name__ == "__main__":
    main()
