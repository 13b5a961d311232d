"""The stores through which ranks create torch.distributed communicators, and their environment."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ringdance.errors import RankLostError
from ringdance.torch.backend import groups
from ringdance.torch.device import communicators


def listening(port: int) -> list[str]:
    """Return the addresses at which this process listens on a port."""
    sockets = psutil.Process().net_connections("tcp")
    return [c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def test_ranks_of_one_host_meet_on_the_loopback() -> None:
    store, served = communicators.serve(1, ["a", "a"])
    assert listening(served[1]) == ["127.0.0.1"]
    store.set("key", "value")
    assert communicators.connect(served, 1).get("key") == b"value"


def test_keys_are_found_only_by_those_who_know_the_prefix() -> None:
    store, (host, port, prefix, *places) = communicators.serve(1, ["a", "b"])
    assert not {"127.0.0.1", "::1"} & set(places)
    store.set("key", "value")
    other = communicators.connect([host, port, "another", "127.0.0.1"], 1)
    assert not other.check(["key"])
    if socket.has_dualstack_ipv6():
        assert communicators.connect(["elsewhere", port, prefix, "::1"], 1).get("key") == b"value"


def test_addresses_of_a_host_with_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("::1", socket.AF_INET6), ("fe80::1%eth0", socket.AF_INET6), ("fd00::2", socket.AF_INET6)]
    rows += [("127.0.0.1", socket.AF_INET), ("02:fc", socket.AF_PACKET)]
    interfaces = {"eth0": [SimpleNamespace(address=address, family=family) for address, family in rows]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert communicators.addresses() == ["fd00::2"]
    store, (_, port, *_) = communicators.serve(1, ["a"])
    with pytest.raises(RankLostError, match=r"on host elsewhere, cannot be reached .* at fd00::2, port"):
        communicators.connect(["elsewhere", port, "", "fd00::2"], 1)
    assert store is not None


def test_the_environment_of_the_users_own_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    names = "NCCL_RUNTIME_CONNECT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    class Nccl:
        def __init__(self, *given: Any) -> None:
            seen.append([os.environ.get(name) for name in names])

        def eager_connect_single_device(self, device: Any) -> None:
            seen.append([os.environ.get(name) for name in names])

    Nccl.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(communicators.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: monkeypatch.context())
    for name in names:
        monkeypatch.delenv(name, raising=False)
    device = SimpleNamespace(type="cuda")
    communicators.group_of(None, 0, 1, device, communicators.TIMEOUT)  # type: ignore[arg-type]
    assert seen == [["0", "2"], ["0", "2"]]
    assert not set(names) & set(os.environ)
    monkeypatch.setenv(names[0], "1")
    communicators.group_of(None, 0, 1, device, communicators.TIMEOUT)  # type: ignore[arg-type]
    assert seen[2:] == [["1", "2"], ["1", "2"]]
    assert os.environ[names[0]] == "1"


def test_ranks_that_start_again_agree_whatever_an_earlier_attempt_has_left() -> None:
    store, names = dist.HashStore(), set()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            works = [pool.submit(groups._agreed, store, rank, 3) for rank in (1, 2, 0)]
            (name,) = {work.result(timeout=20) for work in works}
            names.add(name)
    assert len(names) == 3
