"""A tf.data service: processes on other cores or hosts that prepare batches.

There are two jobs. The *compute* job runs workers (``compute_worker``) and writes a configuration file. The
*training* job reads the file and has its data set computed by the workers::

    config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
    data = data.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)

Dispatchers, which distribute the work, run in either job (``dispatcher_side``). Rank r uses dispatcher
``r % dispatchers``. The servers are TensorFlow's own (``tf.data.experimental.service``).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from horovod.tensorflow.data import registry
from horovod.tensorflow.data.registry import ComputeClient, own_address
from ringdance.errors import ArgumentError
from ringdance.training import collectives, session

__all__ = ["TfDataServiceConfig", "send_to_data_service", "tf_data_service"]

Dataset = Any
SIDES = ("training", "compute")
_FILE_SECONDS = 300.0
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The training job's description of a tf.data service.

    Args:
        dispatchers: Number of dispatchers.
        workers_per_dispatcher: Number of workers per dispatcher.
        dispatcher_side: The job in which dispatchers run: "training" or "compute".
        addresses, key: Accepted as in Horovod, but not used.
        timeout: Seconds to wait for dispatchers and workers.
        directory: Directory of the files through which processes find each other, on a file system that both
            jobs share.

    Raises:
        ArgumentError: A number is below one, or the side is unknown.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: dict[str, list[tuple[str, int]]]
    key: bytes = field(repr=False)
    timeout: int = 60
    directory: str = ""

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ArgumentError(
                f"dispatcher_side={self.dispatcher_side!r} must be 'training' or 'compute'."
            )
        if self.dispatchers < 1 or self.workers_per_dispatcher < 1:
            text = "A tf.data service needs at least one dispatcher, and at least one worker per dispatcher."
            raise ArgumentError(text)

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client that registers processes and waits for them. ``verbose`` has no effect."""
        return ComputeClient(self.directory, self.workers_per_dispatcher, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration in a form that JSON can hold."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(conf: dict[str, Any]) -> TfDataServiceConfig:
        """Return the configuration that ``to_dict`` described."""
        return TfDataServiceConfig(**{**conf, "key": bytes.fromhex(conf["key"])})

    def write(self, filename: str) -> None:
        """Write the configuration to a file atomically, with mode 0600."""
        registry.write_whole(Path(filename), json.dumps(self.to_dict()))

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Return the configuration in a file.

        Args:
            filename: The file. Its path may differ from the path on the compute job's hosts.
            wait_for_file_creation: Wait up to five minutes for the file, because the compute job may start
                later.

        Raises:
            FileNotFoundError: The file does not exist.
            TimeoutError: The file has not appeared.
        """
        if wait_for_file_creation:
            advice = "The compute job writes it when it starts."
            what = f"the file {filename}"
            registry.wait_for(lambda: os.path.exists(filename) or None, what, _FILE_SECONDS, advice)
        path = Path(filename).absolute()
        config = TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        return replace(config, directory=str(path.parent / Path(config.directory).name))


def start_dispatcher() -> tuple[Any, str]:
    """Start a dispatcher in this process. Return it and its address, such as grpc://10.0.0.1:4711."""
    server = tf.data.experimental.service.DispatchServer()
    port = server.target.rpartition(":")[2]
    return server, f"grpc://{own_address()}:{port}"


def start_worker(dispatcher_address: str) -> Any:
    """Start a worker in this process for the dispatcher at ``dispatcher_address``."""
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher_address.partition("://")[2],
        worker_address=f"{own_address()}:%port%",
    )
    return tf.data.experimental.service.WorkerServer(config)


def _check_reachable(address: str) -> None:
    """Raise RegistryError unless a dispatcher listens at ``address``. TensorFlow would retry for minutes."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise registry.RegistryError(
            f"tf.data service: cannot connect to the dispatcher at {address} ({error}). Check that the "
            "compute job is running, and that the configuration file belongs to it."
        ) from error


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of this rank's dispatcher once it has all its workers.

    With ``dispatcher_side="training"``, the first ranks run the dispatchers until all ranks of the job have
    left the block.

    Args:
        compute_config: The configuration that the compute job has written.
        rank: Rank of this process in the training job.

    Raises:
        TimeoutError: Dispatchers or workers did not register.
        RegistryError: The compute job cannot be reached.
    """
    client = compute_config.compute_client()
    number = rank % compute_config.dispatchers
    server = None
    if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
        server, address = start_dispatcher()
        client.register_dispatcher(rank, address)
    address = client.wait_for_dispatcher_registration(number)
    _check_reachable(address)
    client.wait_for_dispatcher_worker_registration(number)
    yield address
    if compute_config.dispatcher_side == "training" and session.is_initialized():
        collectives.barrier(session.engine())  # Other ranks may still read from this rank's dispatcher.
    del server  # TensorFlow's servers stop when the last reference is dropped.


def send_to_data_service(
    dataset: Dataset, compute_config: TfDataServiceConfig, rank: int, size: int | None = None,
    reuse_dataset: bool = False, round_robin: bool = False,
) -> Dataset:
    """Return a data set whose elements are computed by the workers of a tf.data service.

    Everything before this step in the pipeline runs on the workers, and everything after it runs here. Also
    available as a method of ``tf.data.Dataset``.

    Args:
        dataset: The data set to compute.
        compute_config: The configuration that the compute job has written.
        rank: Rank of this process in the training job.
        size: Number of ranks in the training job. Needed for ``round_robin``.
        reuse_dataset: If True, the ranks of a dispatcher share one pass over the data, and each element goes
            to one of them. Otherwise each rank gets all elements.
        round_robin: With ``reuse_dataset``, serve the ranks in turn, all at the same pace. The data set must
            be infinite.

    Raises:
        RuntimeError: The dispatchers run in the training job. Use ``tf_data_service``.
        ArgumentError: ``round_robin`` without ``size``.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service needs dispatchers in the compute job. For dispatchers in the training job, "
            "use a `with tf_data_service(config, rank) as address:` block, and in it apply "
            "tf.data.experimental.service.distribute(service=address, ...)."
        )
    with tf_data_service(compute_config, rank) as address:
        options: dict[str, Any] = {"processing_mode": tf.data.experimental.service.ShardingPolicy.DYNAMIC}
        if reuse_dataset:
            options["job_name"] = "job"
        if reuse_dataset and round_robin:
            if size is None:
                raise ArgumentError("round_robin=True needs size, the number of ranks in the training job.")
            options["processing_mode"] = tf.data.experimental.service.ShardingPolicy.OFF
            options["consumer_index"] = rank // compute_config.dispatchers
            sharing = range(rank % compute_config.dispatchers, size, compute_config.dispatchers)
            options["num_consumers"] = len(sharing)
        distribute = tf.data.experimental.service.distribute(service=address, **options)
        return dataset.apply(distribute)


tf.data.Dataset.send_to_data_service = send_to_data_service
