"""The files that announce a tf.data service, and its configuration."""

from __future__ import annotations

import ipaddress
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

from horovod.tensorflow.data import registry
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service, tf_data_service
from horovod.tensorflow.data.registry import ComputeClient, RegistryError, own_address
from ringdance.errors import ArgumentError


@pytest.fixture
def client(tmp_path: Path) -> ComputeClient:
    return ComputeClient(str(tmp_path), 2, timeout=0.2)


def test_dispatchers(client: ComputeClient) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for dispatcher 1"):
        client.wait_for_dispatcher_registration(1)
    client.register_dispatcher(1, "grpc://a:1")
    assert client.wait_for_dispatcher_registration(1) == "grpc://a:1"
    client.register_dispatcher(1, "grpc://a:1")  # registering the same address again is allowed
    with pytest.raises(ArgumentError, match="dispatcher 1 is registered already, at grpc://a:1"):
        client.register_dispatcher(1, "grpc://b:1")


def test_workers(client: ComputeClient, tmp_path: Path) -> None:
    for worker in (0, 0):
        client.register_worker_for_dispatcher(0, worker)
    with pytest.raises(TimeoutError, match="all workers of dispatcher 0"):
        client.wait_for_dispatcher_worker_registration(0)
    client.register_worker_for_dispatcher(0, 2)
    client.wait_for_dispatcher_worker_registration(0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0-0", "worker-0-2"]


def test_waiting_processes_are_released(client: ComputeClient) -> None:
    released: list[str] = []
    waits = [
        threading.Thread(target=lambda: released.append(client.wait_for_dispatcher_registration(0, 60))),
        threading.Thread(target=lambda: released.append(str(client.wait_for_shutdown()))),
    ]
    for waiter in waits:
        waiter.start()
    time.sleep(0.1)
    assert released == []
    client.register_dispatcher(0, "grpc://a:1")
    client.shutdown()
    for waiter in waits:
        waiter.join(60)
    assert sorted(released) == ["None", "grpc://a:1"]


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    client = ComputeClient(str(tmp_path / "gone"), 1)
    with pytest.raises(RegistryError, match=r"gone cannot be used \(No such file.*check that the job"):
        client.shutdown()
    with pytest.raises(RegistryError, match="gone cannot be used"):
        client.wait_for_dispatcher_registration(0)


def config(directory: str = "/data/service.json.x1", side: str = "compute") -> TfDataServiceConfig:
    return TfDataServiceConfig(2, 3, side, {}, b"\x00\xff", 7, directory)


def test_a_dispatcher_that_does_not_listen(tmp_path: Path) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    address = f"grpc://127.0.0.1:{free.getsockname()[1]}"
    free.close()
    config(str(tmp_path)).compute_client().register_dispatcher(0, address)
    with pytest.raises(RegistryError, match=f"cannot connect to the dispatcher at {address}"):
        tf_data_service(config(str(tmp_path)), 0).__enter__()


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(path))
    later = threading.Timer(0.3, lambda: config().write(str(path)))
    later.start()
    # The directory is expected next to the file, because another host may mount it elsewhere.
    expected = config(str(tmp_path / "service.json.x1"))
    assert TfDataServiceConfig.read(str(path), wait_for_file_creation=True) == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["service.json"]


def test_wrong_configurations() -> None:
    with pytest.raises(ArgumentError, match="dispatcher_side='both'"):
        config(side="both")
    with pytest.raises(ArgumentError, match="at least one"):
        TfDataServiceConfig(1, 0, "compute", {}, b"")
    with pytest.raises(RuntimeError, match="with tf_data_service"):
        send_to_data_service(None, config(side="training"), 0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["127.0.1.1", "::1", "fe80::1%eth0"], "127.0.0.1"),
        (["127.0.1.1", "fd00::7"], "[fd00::7]"),
        (["fd00::7", "10.0.0.5"], "10.0.0.5"),
    ],
)
def test_own_address(found: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0)) for address in found]
    )
    assert own_address() == expected
    assert ipaddress.ip_address(expected.strip("[]"))
