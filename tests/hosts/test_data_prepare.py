"""`ringdance data prepare` by processes on several hosts."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hosts import Hosts

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]
PIL = pytest.importorskip("PIL.Image")
PREPARE = (sys.executable, "-m", "ringdance", "data", "prepare", "imagenet")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number in range(24):
        data = io.BytesIO()
        PIL.new("RGB", (64, 48), (number * 9, 80, 120)).save(data, "JPEG")
        path = tmp_path / f"src/n{number % 4}/{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())
    return tmp_path / "src"


def test_hosts_write_what_one_process_writes(three_hosts: Hosts, source: Path, tmp_path: Path) -> None:
    words = [*PREPARE, str(source), "--shards", "6"]
    done = three_hosts.run("h1", *words, str(tmp_path / "several"), "-H", "h2:2,h3:1")
    assert done.returncode == 0, done.stderr
    done = three_hosts.run("h1", *words, str(tmp_path / "one"), "-np", "1")
    assert done.returncode == 0, done.stderr
    several, one = (
        {path.name: path.read_bytes() for path in (tmp_path / directory).glob("train*")}
        for directory in ("several", "one")
    )
    assert several == one
    assert len(one) == 8
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_a_destination_that_hosts_do_not_share(three_hosts: Hosts, source: Path) -> None:
    # /run is each host's own.
    done = three_hosts.run("h1", *PREPARE, str(source), "/run/dst", "--shards", "6", "-H", "h1:1,h2:1")
    assert done.returncode != 0
    assert "host h2: no /run/dst/.prepare here: DST and SRC must be on a file system" in done.stderr
