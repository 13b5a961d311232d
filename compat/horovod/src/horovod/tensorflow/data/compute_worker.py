"""The compute job of a tf.data service: ``python -m horovod.tensorflow.data.compute_worker FILE``."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, start_dispatcher, start_worker
from ringdance.errors import ArgumentError
from ringdance.training import basics, collectives, session
from ringdance.training.objects import broadcast_object

__all__ = ["main", "run_worker"]


def run_worker(
    filename: str, dispatchers: int = 1, dispatcher_side: str = "compute", timeout: int = 60
) -> None:
    """Run a tf.data service's compute job on all its ranks, until the training job ends it.

    Args:
        filename: Configuration file to write, on a file system that both jobs share.
        dispatchers: Number of dispatchers. Rank r is a worker of dispatcher ``r % dispatchers``.
        dispatcher_side: "compute" runs the dispatchers in this job's first ranks, "training" in the training
            job's first ranks.
        timeout: Seconds to wait for dispatchers and workers.

    Raises:
        ArgumentError: The number of ranks is not a multiple of the number of dispatchers.
        TimeoutError: A dispatcher did not register.
    """
    basics.init()
    rank, size = basics.rank(), basics.size()
    if dispatchers < 1 or size % dispatchers:
        raise ArgumentError(
            f"{size} workers cannot be shared out equally among {dispatchers} dispatchers. Start a multiple."
        )
    config = None
    if rank == 0:
        path = Path(filename).absolute()
        directory = tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0700
        workers = size // dispatchers
        config = TfDataServiceConfig(dispatchers, workers, dispatcher_side, {}, b"", timeout, directory)
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
    # TensorFlow's servers stop when the last reference is dropped: first all workers, then the dispatchers.
    del worker
    collectives.barrier(session.engine())
    del dispatcher
    if rank == 0:
        shutil.rmtree(config.directory, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a worker with the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="compute_worker", description="Workers of a tf.data service, one for each rank of this job."
    )
    parser.add_argument("configfile", help="configuration file to write, for the training job to read")
    parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers (1)")
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute", help="job that runs the dispatchers (compute)"
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for each other (60)")
    options = parser.parse_args(arguments)
    run_worker(options.configfile, options.dispatchers, options.dispatcher_side, options.timeout)


if __name__ == "__main__":
    main()
