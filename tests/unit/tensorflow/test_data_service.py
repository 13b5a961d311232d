"""The registry of a tf.data service, and its configuration file."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from ringdance.errors import ArgumentError
from ringdance.tensorflow.compute_registry import ComputeClient, ComputeRegistry, RegistryError
from ringdance.tensorflow.data_service import TfDataServiceConfig, send_to_data_service

KEY = b"secret"


@pytest.fixture
def registry() -> Iterator[ComputeRegistry]:
    made = ComputeRegistry(2, 2, KEY)
    yield made
    made.close()


@pytest.fixture
def client(registry: ComputeRegistry) -> ComputeClient:
    return ComputeClient(registry.addresses, KEY, timeout=0.2)


def test_dispatchers(client: ComputeClient) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for dispatcher 1"):
        client.wait_for_dispatcher_registration(1)
    client.register_dispatcher(1, "grpc://a:1")
    assert client.wait_for_dispatcher_registration(1) == "grpc://a:1"
    client.register_dispatcher(1, "grpc://a:1")  # once more is no harm
    with pytest.raises(ArgumentError, match="dispatcher 1 is registered already, at grpc://a:1"):
        client.register_dispatcher(1, "grpc://b:1")
    with pytest.raises(ArgumentError, match="no dispatcher 2, only 0 to 1"):
        client.register_dispatcher(2, "grpc://c:1")


def test_workers(client: ComputeClient) -> None:
    for worker in (0, 0):
        client.register_worker_for_dispatcher(0, worker)
    with pytest.raises(TimeoutError, match="all workers of dispatcher 0"):
        client.wait_for_dispatcher_worker_registration(0)
    client.register_worker_for_dispatcher(0, 2)
    client.wait_for_dispatcher_worker_registration(0)
    with pytest.raises(ArgumentError, match="dispatcher 0 has all its 2 workers already"):
        client.register_worker_for_dispatcher(0, 4)


def test_who_waits_hears_of_it(client: ComputeClient) -> None:
    heard: list[str] = []
    waits = [
        threading.Thread(target=lambda: heard.append(client.wait_for_dispatcher_registration(0, 60))),
        threading.Thread(target=lambda: heard.append(str(client.wait_for_shutdown()))),
    ]
    for one in waits:
        one.start()
    time.sleep(0.1)
    assert heard == []
    client.register_dispatcher(0, "grpc://a:1")
    client.shutdown()
    for one in waits:
        one.join(60)
    assert sorted(heard) == ["None", "grpc://a:1"]


def test_only_those_who_know_the_key(registry: ComputeRegistry, client: ComputeClient) -> None:
    stranger = ComputeClient(registry.addresses, b"guess")
    with pytest.raises(RegistryError, match="cannot be reached"):
        stranger.shutdown()
    client.register_dispatcher(0, "grpc://a:1")  # the registry goes on


def test_a_registry_that_is_not_there() -> None:
    made = ComputeRegistry(1, 1, KEY)
    addresses = made.addresses
    made.close()
    with pytest.raises(RegistryError, match="runs on rank 0 of the compute workers"):
        ComputeClient(addresses, KEY).shutdown()


def config(side: str = "compute") -> TfDataServiceConfig:
    return TfDataServiceConfig(2, 3, side, {"node1": [("10.0.0.1", 4711)]}, b"\x00\xff", 7)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(path))
    later = threading.Timer(0.3, lambda: config().write(str(path)))
    later.start()
    assert TfDataServiceConfig.read(str(path), wait_for_file_creation=True) == config()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["service.json"]
    assert "ff" not in repr(config())


def test_wrong_configurations() -> None:
    with pytest.raises(ArgumentError, match="dispatcher_side='both'"):
        config("both")
    with pytest.raises(ArgumentError, match="at least one"):
        TfDataServiceConfig(1, 0, "compute", {}, KEY)
    with pytest.raises(RuntimeError, match="with tf_data_service"):
        send_to_data_service(None, config("training"), 0)
