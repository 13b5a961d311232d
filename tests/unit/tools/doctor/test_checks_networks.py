"""Checks of networks between hosts. Each host is a network namespace, and a virtual cable joins them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from breaking import breaks, need_namespaces, program

from ringdance.launch.remote.shell import RemoteShell
from ringdance.tools.doctor.check import Result, Usage
from ringdance.tools.doctor.examine import collect, examine
from ringdance.tools.hosts.host_set import HostSet

HOSTS = ("10.99.0.1", "10.99.0.2")


class Pair:
    """Two hosts, identified by their addresses."""

    def __init__(self, spaces: list[int]) -> None:
        self._spaces = dict(zip(HOSTS, spaces, strict=True))

    def on(self, host: str, line: str) -> None:
        """Run a command in a host's network namespace."""
        subprocess.run(
            ["nsenter", "-t", str(self._spaces[host]), "-n", "sh", "-ec", line], check=True, timeout=30
        )

    def results(self, check: str) -> list[Result]:
        with closing(HostSet(dict.fromkeys(HOSTS, 0), RemoteShell())) as hosts:
            hosts.connect(15.0)
            facts = collect(hosts, ["network"], Usage(hosts=HOSTS), 30.0)
        assert not any(host_facts["reach"]["error"] for host_facts in facts.values()), facts
        return examine(facts, Usage(hosts=HOSTS), [check])


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    need_namespaces("--net", "--mount")
    if not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("needs ip and nsenter")
    # Each process sleeps in its own network until the test ends. Mounting sysfs again makes it show that
    # network.
    keepers = [
        subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-ec",
             "echo host$$ >/proc/sys/kernel/hostname; mount -t sysfs none /sys; echo; exec sleep 300"],
            stdout=subprocess.PIPE,
        )
        for _ in HOSTS
    ]  # fmt: skip
    try:
        for keeper in keepers:
            assert keeper.stdout
            assert keeper.stdout.readline() == b"\n", "the network namespace was not created"
        made = Pair([keeper.pid for keeper in keepers])
        made.on(HOSTS[0], f"ip link add e0 type veth peer name e0 netns {keepers[1].pid}")
        for host in HOSTS:
            made.on(host, f"ip link set lo up; ip addr add {host}/24 dev e0; ip link set e0 up")
        for host in HOSTS:  # the kernel marks a link as up a moment later
            made.on(host, "until ip link show e0 | grep -q 'state UP'; do sleep 0.05; done")
        cases = "".join(f"{host}) pid={keeper.pid} ;;" for host, keeper in zip(HOSTS, keepers, strict=True))
        program(
            tmp_path / "ssh",
            'while [ "$1" != -- ]; do shift; done\n'
            f'case $2 in {cases} esac\nexec nsenter -t $pid -n -m -u sh -c "$3"',
        )
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        yield made
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


@breaks("same-mtu")
def test_networks_and_their_mtu(pair: Pair) -> None:
    assert [result.severity for result in pair.results("same-mtu")] == ["ok"]
    pair.on(HOSTS[1], "ip link set e0 mtu 1400")
    (result,) = pair.results("same-mtu")
    assert "MTU 1400 on 10.99.0.2, but MTU 1500 on 10.99.0.1" in result.text
    assert "mtu 1400 on all hosts" in result.fix
