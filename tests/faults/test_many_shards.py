"""More shards than a process may open: images and tables, an epoch and a resumption on 3 ranks."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringdance.data import Dataset, Table
from ringdance.data.dataset import ROW, ShardFile
from ringdance.data.tables.rows import Rows
from ringdance.data.tables.table import TableFile
from ringdance.errors import ArgumentError

Image = pytest.importorskip("PIL.Image")
SHARDS, LIMIT = 600, 256

JOB = """
import resource, sys
from collections import Counter
import ringdance.numpy as hvd
from ringdance.data import Dataset, Loader, Table, TableLoader

hvd.init()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 256)
mine = {"rank": hvd.rank(), "size": hvd.size(), "shuffle": True}

def images():
    return Loader(Dataset.open(sys.argv[1]), 20, image_size=8, augment=False, **mine)

def rows():
    return TableLoader(Table.open(sys.argv[2]), 20, **mine)

def numbers(batch):
    return (batch.indices if hasattr(batch, "indices") else batch.ids[:, 0]).tolist() if batch.weight else []

for make in (images, rows):
    seen, loader = [], make()
    for batch in loader:
        seen += numbers(batch)
        if batch.position >= 300:
            break
    resumed = make()
    resumed.set_epoch(0, batch.position)
    for batch in resumed:
        seen += numbers(batch)
    counts = Counter(number for some in hvd.allgather_object(seen) for number in some)
    assert counts == Counter(range(len(loader.dataset if make is images else loader.table))), counts
if hvd.rank() == 0:
    print("each sample once")
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create that many shards with one image each."""
    path, memory, rows = tmp_path_factory.mktemp("images"), io.BytesIO(), np.zeros(SHARDS, ROW)
    Image.new("RGB", (8, 8)).save(memory, "PNG")
    data = memory.getvalue()
    rows["file"], rows["length"] = np.arange(SHARDS), len(data)
    files = [ShardFile(f"train-{number}.tar", 1, len(data), 0) for number in range(SHARDS)]
    for file in files:
        (path / file.name).write_bytes(data)
    Dataset(path, "train", "webdataset", ["a"], files, rows).write()
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create that many files with two rows each. A row's id is its number."""
    path, files = tmp_path_factory.mktemp("table"), []
    for number in range(SHARDS):
        ids = np.array([[2 * number], [2 * number + 1]])
        np.save(
            path / f"{number}.npy", Rows(np.zeros(2, np.float32), ids, np.ones((2, 1), np.float32)).packed()
        )
        files.append(TableFile(f"{number}.npy", 2, (path / f"{number}.npy").stat().st_size))
    Table(path, "train", "rows", 1, 2 * SHARDS, files, np.empty(0, np.uint64)).write()
    return path


def test_each_sample_once_with_fewer_open_files_than_shards(
    images: Path, table: Path, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    limits = f'ulimit -n {LIMIT}; exec "$@"'
    command = [sys.executable, "-m", "ringdance", "run", "-np", "3", sys.executable, script, images, table]
    done = subprocess.run(
        ["bash", "-c", limits, "-", *map(str, command)], capture_output=True, text=True, timeout=120
    )
    assert "each sample once" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_the_soft_limit_is_raised_and_the_limit_is_named(images: Path, table: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
        data, rows = Dataset.open(images), Table.open(table)
        for number in range(SHARDS):
            data.read(number)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > LIMIT
        rows.read(np.array([2]))
        data.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for read in (lambda: data.read(0), lambda: rows.read(np.array([0]))):
            with pytest.raises(ArgumentError, match=r"Too many open files. The limit of this process is 256"):
                read()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
