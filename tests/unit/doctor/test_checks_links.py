"""Checks of what is between hosts: each host is a network namespace, joined by a real (virtual) cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from breaking import breaks, need_namespaces, program

from ringdance.doctor import gather
from ringdance.doctor.check import Result, Usage
from ringdance.doctor.examine import examine
from ringdance.launch.remote.shell import RemoteShell

HOSTS = ("10.99.0.1", "10.99.0.2")


class Pair:
    """Two hosts, by their addresses."""

    def __init__(self, spaces: list[int]) -> None:
        self._spaces = dict(zip(HOSTS, spaces, strict=True))

    def on(self, host: str, line: str) -> None:
        """Run a command in the network of a host."""
        subprocess.run(
            ["nsenter", "-t", str(self._spaces[host]), "-n", "sh", "-ec", line], check=True, timeout=30
        )

    def results(self, check: str) -> list[Result]:
        with gather.started(HOSTS, RemoteShell(), ()) as remotes:
            facts = gather.collect(remotes, ["network"], Usage(hosts=HOSTS), 30.0)
            assert not any(found["reach"]["error"] for found in facts.values()), facts
            if check in ("hosts-connect", "link-bandwidth"):
                for host, found in gather.measure(remotes, facts, 20.0).items():
                    facts[host]["links"] = found
        return examine(facts, Usage(hosts=HOSTS), [check])


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    need_namespaces("--net", "--mount")
    if not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("needs ip and nsenter")
    # Each sleeps in its own network until the test ends; sysfs must be mounted anew to show it.
    keepers = [
        subprocess.Popen(["unshare", "--net", "--mount", "sh", "-ec", "mount -t sysfs none /sys; echo; "
                                                                      "exec sleep 300"],
                         stdout=subprocess.PIPE)
        for _ in HOSTS
    ]  # fmt: skip
    try:
        for keeper in keepers:
            assert keeper.stdout
            assert keeper.stdout.readline() == b"\n", "its network is not there"
        made = Pair([keeper.pid for keeper in keepers])
        made.on(HOSTS[0], f"ip link add e0 type veth peer name e0 netns {keepers[1].pid}")
        for host in HOSTS:
            made.on(host, f"ip link set lo up; ip addr add {host}/24 dev e0; ip link set e0 up")
        for host in HOSTS:  # the kernel marks a link as running a moment later
            made.on(host, "until ip link show e0 | grep -q 'state UP'; do sleep 0.05; done")
        cases = "".join(f"{host}) pid={keeper.pid} ;;" for host, keeper in zip(HOSTS, keepers, strict=True))
        program(
            tmp_path / "ssh",
            'while [ "$1" != -- ]; do shift; done\n'
            f'case $2 in {cases} esac\nexec nsenter -t $pid -n -m sh -c "$3"',
        )
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        yield made
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


@breaks("hosts-connect")
@pytest.mark.limit(100)
def test_a_firewall(pair: Pair) -> None:
    assert [result.severity for result in pair.results("hosts-connect")] == ["ok"]
    pair.on(HOSTS[1], f"ip route add prohibit {HOSTS[0]}/32 table local")
    wrong = [result for result in pair.results("hosts-connect") if result.wrong]
    assert any(f"{HOSTS[1]} cannot connect to {HOSTS[0]}" in result.text for result in wrong), wrong


@breaks("link-bandwidth")
@pytest.mark.limit(100)
def test_a_slow_link(pair: Pair) -> None:
    assert [result.severity for result in pair.results("link-bandwidth")] == ["ok"]
    if not shutil.which("tc"):
        pytest.skip("needs tc")
    for host in HOSTS:
        pair.on(host, "tc qdisc add dev e0 root tbf rate 20mbit burst 64kb latency 100ms")
    (result,) = pair.results("link-bandwidth")
    assert result.severity == "warning"
    assert f"Gbit/s between {HOSTS[0]} and {HOSTS[1]}" in result.text


@breaks("common-network", "same-mtu")
def test_networks_and_their_mtu(pair: Pair) -> None:
    for check in ("common-network", "same-mtu"):
        assert [result.severity for result in pair.results(check)] == ["ok"]
    pair.on(HOSTS[1], "ip link set e0 mtu 1400")
    (result,) = pair.results("same-mtu")
    assert "MTU 1400 on 10.99.0.2, but MTU 1500 on 10.99.0.1" in result.text
    assert "mtu 1400 on all hosts" in result.fix
    pair.on(HOSTS[1], "ip addr flush dev e0; ip addr add 10.98.0.2/24 dev e0")
    (result,) = pair.results("common-network")
    assert "no network is common to all hosts" in result.text


def test_each_pair_comes_once_and_no_host_is_in_two_at_a_time() -> None:
    for count in range(2, 10):
        hosts = [f"h{number}" for number in range(count)]
        seen = []
        for pairs in gather.rounds(hosts):
            busy = [host for pair in pairs for host in pair]
            assert len(busy) == len(set(busy))
            seen += [frozenset(pair) for pair in pairs]
        assert len(seen) == len(set(seen)) == count * (count - 1) // 2
