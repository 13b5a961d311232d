"""`ringdance data prepare` by processes on several hosts."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from criteo_lines import criteo_lines
from hosts import Hosts

from ringdance.data import planted

pytestmark = pytest.mark.limit(300)
PIL = pytest.importorskip("PIL.Image")
PREPARE = (sys.executable, "-m", "ringdance", "data", "prepare")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(24):
        data = io.BytesIO()
        PIL.new("RGB", (64, 48), (number * 9, 80, 120)).save(data, "JPEG")
        path = tmp_path / f"src/n{number % 4}/{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())
    return tmp_path / "src"


@pytest.fixture
def criteo(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    for day, some in enumerate(planted(200_000)):
        (tmp_path / f"days/day_{day}").parent.mkdir(exist_ok=True)
        (tmp_path / f"days/day_{day}").write_bytes(criteo_lines(some))
    return tmp_path / "days"


@pytest.mark.parametrize("dataset", ["imagenet", "criteo"])
def test_hosts_write_what_one_process_writes(
    three_hosts: Hosts, request: pytest.FixtureRequest, tmp_path: Path, dataset: str
) -> None:
    source = request.getfixturevalue("images" if dataset == "imagenet" else dataset)
    words = [*PREPARE, dataset, str(source), "--shards", "6"]
    done = three_hosts.run("h1", *words, str(tmp_path / "several"), "-H", "h2:2,h3:1")
    assert done.returncode == 0, done.stderr
    done = three_hosts.run("h1", *words, str(tmp_path / "one"), "-np", "1")
    assert done.returncode == 0, done.stderr
    several, one = (
        {path.name: path.read_bytes() for path in (tmp_path / directory).glob("train*")}
        for directory in ("several", "one")
    )
    assert several == one
    assert len(one) == 6 + (2 if dataset == "imagenet" else 1)  # and their index
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]


def test_a_destination_that_hosts_do_not_share(three_hosts: Hosts, images: Path) -> None:
    # /run is each host's own.
    words = ("imagenet", str(images), "/run/dst", "--shards", "6", "-H", "h1:1,h2:1")
    done = three_hosts.run("h1", *PREPARE, *words)
    assert done.returncode != 0
    assert "host h2: no /run/dst/.prepare here: DST and SRC must be on a file system" in done.stderr
