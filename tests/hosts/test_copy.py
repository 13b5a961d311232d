"""`ringdance hosts` over ssh on simulated hosts, with links of limited speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, wait_until, why_not

pytestmark = pytest.mark.limit(250)
LINE = (sys.executable, "-m", "ringdance", "hosts")
SIZE = 40_000_000


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    """h1 copies to h2, h3 and h4, each over a link of 100 Mbit/s. Each host has its own /run."""
    if why_not():
        pytest.skip(f"simulated hosts: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="rdh-") as directory:
        hosts = Hosts(Path(directory) / "net", 4, rate=100)
        yield hosts
        hosts.down()


@pytest.fixture
def big(tmp_path: Path) -> Path:
    (tmp_path / "big").write_bytes(os.urandom(SIZE))
    return tmp_path / "big"


def sent(hosts: Hosts, name: str) -> int:
    """Return the number of bytes that have left a host."""
    fields = re.search(r"eth0:(.*)", hosts.run(name, "cat", "/proc/net/dev").stdout)
    assert fields
    return int(fields[1].split()[8])


def digest(hosts: Hosts, name: str, path: str) -> str:
    return hosts.run(name, "sha256sum", path).stdout.split()[0]


def partial(hosts: Hosts, name: str) -> int:
    result = hosts.run(name, "sh", "-c", "stat -c %s /run/.big.ringdance-* 2>/dev/null").stdout
    return int(result or 0)


def test_the_leaders_link_carries_it_once(four: Hosts, big: Path) -> None:
    before = {name: sent(four, name) for name in four.names}
    done = four.run("h1", *LINE, "copy", "-H", "h2,h3,h4", str(big), "/run/once", timeout=100.0)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loads = {name: (sent(four, name) - before[name]) / SIZE for name in four.names}
    assert 1.0 < loads["h1"] < 1.2, loads  # including the overhead of TCP and ssh
    assert 1.0 < loads["h2"] < 1.2, loads
    assert 1.0 < loads["h3"] < 1.2, loads
    assert loads["h4"] < 0.2, loads
    wanted = digest(four, "h1", str(big))
    assert [digest(four, name, "/run/once") for name in ("h2", "h3", "h4")] == [wanted] * 3


def test_an_interrupted_copy_goes_on_where_it_was(four: Hosts, big: Path, tmp_path: Path) -> None:
    words = (*LINE, "copy", "-H", "h2,h3,h4", str(big), "/run/", "--json")
    outer = four.start("h1", *words, log=tmp_path / "log")
    assert wait_until(lambda: partial(four, "h4") > SIZE // 4, 60.0) is not None
    subprocess.run(["pkill", "-KILL", "-P", str(outer.pid)], check=False)
    outer.kill()
    outer.wait()
    for name in ("h2", "h3", "h4"):
        gone = lambda name=name: "host.agent.main" not in str(four.processes(name).values())  # noqa: E731
        assert wait_until(gone, 30.0) is not None
    kept = {name: partial(four, name) for name in ("h2", "h3", "h4")}
    before = sent(four, "h1")
    done = four.run("h1", *words, timeout=100.0)
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout):
        assert row["kept"] == kept[row["host"]]
        assert row["bytes"] == SIZE - row["kept"]
        assert digest(four, row["host"], "/run/big") == digest(four, "h1", str(big))
    assert sent(four, "h1") - before < 1.2 * (SIZE - min(kept.values())) + 1e6


def test_a_host_that_falls_out_does_not_stop_the_others(four: Hosts, big: Path, tmp_path: Path) -> None:
    words = (*LINE, "copy", "-H", "h2,h3,h4", str(big), "/run/", "--json", "--checksum")
    for name in ("h2", "h3", "h4"):
        four.run(name, "rm", "-f", "/run/big")
    outer = four.start("h1", *words, log=tmp_path / "log")
    assert wait_until(lambda: partial(four, "h3") > SIZE // 10, 60.0) is not None
    four.unplug("h3")
    try:
        assert outer.wait(100.0) == 1
    finally:
        four.plug("h3")
    said = (tmp_path / "log").read_text()
    results = {row["host"]: row for row in json.loads(said[said.index("[") :])}
    assert "host lost" in results["h3"]["problem"]
    for name in ("h2", "h4"):
        assert not results[name]["problem"]
        assert digest(four, name, "/run/big") == digest(four, "h1", str(big))


def test_where_hosts_cannot_reach_each_other_the_leader_sends(four: Hosts, big: Path) -> None:
    assert four.run("h2", "ip", "route", "add", "unreachable", four.address["h3"]).returncode == 0
    try:
        done = four.run("h1", *LINE, "copy", "-H", "h2,h3,h4", str(big), "/run/far", timeout=100.0)
    finally:
        four.run("h2", "ip", "route", "del", "unreachable", four.address["h3"])
    assert done.returncode == 0, done.stderr
    assert "h2 cannot connect to h3" in done.stderr
    assert digest(four, "h4", "/run/far") == digest(four, "h1", str(big))
