"""The compute job of a tf.data service: each rank is ``python -m ringdance.tensorflow.compute_worker F``."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence

from ringdance import session
from ringdance.errors import ArgumentError
from ringdance.tensorflow.compute_registry import ComputeRegistry
from ringdance.tensorflow.data_service import SIDES, TfDataServiceConfig, start_dispatcher, start_worker
from ringdance.training import basics, collectives
from ringdance.training.objects import broadcast_object

__all__ = ["main", "run_worker"]


def run_worker(
    filename: str, dispatchers: int = 1, dispatcher_side: str = "compute", timeout: int = 60
) -> None:
    """Work for a tf.data service until the training job ends it. All ranks of the compute job call this.

    Args:
        filename: rank 0 writes to it how the service is found.
        dispatchers: how many; the ranks are shared out among them as workers.
        dispatcher_side: "compute" runs them in the first ranks of this job, "training" in those of the other.
        timeout: seconds to wait for dispatchers and workers.

    Raises:
        ArgumentError: the number of ranks is not a multiple of that of dispatchers.
        TimeoutError: a dispatcher has not come.
    """
    basics.init()
    rank, size = basics.rank(), basics.size()
    if dispatchers < 1 or size % dispatchers:
        raise ArgumentError(
            f"{size} workers cannot be shared out equally among {dispatchers} dispatchers: start a multiple."
        )
    registry = config = None
    if rank == 0:
        key = secrets.token_bytes(32)
        registry = ComputeRegistry(dispatchers, size // dispatchers, key)
        config = TfDataServiceConfig(
            dispatchers, size // dispatchers, dispatcher_side, registry.addresses, key, timeout
        )
        config.write(filename)
    config = broadcast_object(config, 0, "compute_worker")
    client = config.compute_client()
    dispatcher = None
    if dispatcher_side == "compute" and rank < dispatchers:
        dispatcher, address = start_dispatcher()
        client.register_dispatcher(rank, address)
    number = rank % dispatchers
    worker = start_worker(client.wait_for_dispatcher_registration(number))
    client.register_worker_for_dispatcher(number, rank)
    client.wait_for_shutdown()
    # TensorFlow's servers stop when nobody has them: first all workers, then what they need.
    del worker
    collectives.barrier(session.engine())
    del dispatcher
    if registry is not None:
        registry.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a worker as the command line says."""
    parser = argparse.ArgumentParser(
        prog="compute_worker", description="Workers of a tf.data service, one for each rank of this job."
    )
    parser.add_argument("configfile", help="file in which the training job finds the service")
    parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers (1)")
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute", help="the job that runs them (compute)"
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for one another (60)")
    given = parser.parse_args(arguments)
    run_worker(given.configfile, given.dispatchers, given.dispatcher_side, given.timeout)


if __name__ == "__main__":
    main()
