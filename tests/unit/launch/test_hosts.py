"""Where ranks are placed, how they are numbered, and over which networks they communicate."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from ringdance.errors import LaunchError
from ringdance.host.schedulers import this_machine
from ringdance.host.schedulers.this_machine import local_names
from ringdance.launch.hosts import HostFacts, assign_ranks, rank_numbers, shared_networks, spans


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 9], "0,2-3,9"), ([4, 5], "4-5")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_names_of_this_machine() -> None:
    hostname = os.uname().nodename
    names = ["localhost", "127.0.0.1", "127.0.0.2", hostname, "no-such-host.invalid", "192.0.2.7"]
    assert {"localhost", "127.0.0.1", hostname} <= local_names(names) <= set(names[:4])


def test_names_are_looked_up_at_the_same_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(name: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(name)
        time.sleep(0.1)
        raise OSError("no such name")

    monkeypatch.setattr(this_machine.socket, "getaddrinfo", slow)
    monkeypatch.setattr(this_machine, "_KEPT_S", 1e9)
    names, began = [f"node{number}.invalid" for number in range(60)], time.monotonic()
    for _ in range(3):
        assert local_names([*names, "localhost"]) == {"localhost"}
    assert sorted(asked) == sorted(names)
    assert time.monotonic() - began < 3.0


def test_ranks_fill_hosts_in_the_order_given() -> None:
    placed = assign_ranks(5, [("a", 2), ("b", 4), ("c", 1)])
    assert [(host.name, host.ranks) for host in placed] == [("a", (0, 1)), ("b", (2, 3, 4))]


def test_numbers_of_ranks_on_uneven_hosts() -> None:
    numbering = rank_numbers(assign_ranks(4, [("a", 2), ("b", 1), ("c", 1)]))
    assert [list(numbers.values()) for numbers in numbering] == [
        [0, 4, 0, 2, 0, 3],
        [1, 4, 1, 2, 0, 1],
        [2, 4, 0, 1, 1, 3],
        [3, 4, 0, 1, 2, 3],
    ]


def facts(*networks: tuple[str, str, int], reached: str = "") -> HostFacts:
    return HostFacts(networks=networks, reached=reached)


DOCKER = ("docker0", "172.17.0.1", 16)


def test_hosts_meet_on_the_network_by_which_they_are_reached() -> None:
    networks = shared_networks(
        {
            "a": facts(("eth0", "10.0.0.1", 24), ("ib0", "10.9.0.1", 16), DOCKER),
            "b": facts(("ens3", "10.0.0.2", 24), ("ib0", "10.9.0.2", 16), DOCKER, reached="10.0.0.2"),
        }
    )
    assert networks.include == ("10.0.0.0/24",)
    assert networks.interfaces == {"a": ("eth0",), "b": ("ens3",)}


def test_a_bridge_with_one_address_on_all_hosts_is_no_way_between_them() -> None:
    pods = {
        "a": facts(("eth0", "10.1.1.5", 24), DOCKER),
        "b": facts(("eth0", "10.1.2.5", 24), DOCKER, reached="10.1.2.5"),
    }
    networks = shared_networks(pods)
    assert (networks.include, networks.exclude) == ((), ("172.17.0.0/16",))
    both = {name: facts(("eth0", f"10.0.0.{n}", 8), DOCKER) for n, name in enumerate("ab", 1)}
    assert shared_networks(both).include == ("10.0.0.0/8",)


def test_ipv6_where_there_is_nothing_else() -> None:
    docker = facts(DOCKER, ("eth0", "fd00::1", 64))
    other = facts(DOCKER, ("ens3", "fd00::2", 64), ("ib0", "fd01::2", 64))
    networks = shared_networks({"a": docker, "b": other})
    assert (networks.include, networks.ipv6) == (("fd00::/64",), True)
    assert networks.interfaces == {"a": ("eth0",), "b": ("ens3",)}
    both = {
        name: facts(("eth0", f"10.0.0.{n}", 8), ("eth0", f"fd00::{n}", 64), reached=f"fd00::{n}")
        for n, name in enumerate("ab", 1)
    }
    assert (shared_networks(both).include, shared_networks(both).ipv6) == (("10.0.0.0/8",), False)


def test_interfaces_that_the_user_names() -> None:
    both = {
        name: facts(("eth0", f"10.0.0.{n}", 8), ("ib0", f"10.9.0.{n}", 16)) for n, name in enumerate("ab", 1)
    }
    assert shared_networks(both, ["ib0"]).include == ("ib0",)
    assert shared_networks(both, ["ib0"]).interfaces == {"a": ("ib0",), "b": ("ib0",)}
    with pytest.raises(LaunchError, match="host b has no network interface ib0; it has eth0"):
        shared_networks({**both, "b": facts(("eth0", "10.0.0.2", 8))}, ["ib0"])
