"""The DeepFM recipe killed in mid-epoch, resumed with other numbers of ranks: each row counts once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from processes import Job, needed, start, wait_until
from sample_counts import each_once
from test_deepfm_recipe import RECIPES, kill, newest

from ringdance.data.tables import Rows
from ringdance.data.tables.writing import TableWriter, write_index
from ringdance.training.checkpoint_files import CheckpointFiles, present_path

needed("torch")
ROWS, FIELDS = 20_001, 3

# The unchanged recipe, but its model records which rows each step gets, and the position afterwards.
RECORDER = """
import json, sys
sys.path.insert(0, {recipes!r})
import loop, train_torch
import ringdance.torch as hvd

class Resumed(train_torch.TorchTableModel):
    def step(self, batch, rate):
        loss = super().step(batch, rate)
        rows = batch.ids[:, 1].tolist() if batch.weight else []
        with open(f"{record}-{{hvd.rank()}}.jsonl", "a") as file:
            print(json.dumps([batch.position, rows]), file=file)
        return loss

loop.main("", Resumed)
"""


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Create rows whose second id is their number."""
    path = tmp_path / "set"
    path.mkdir()
    numbers = np.arange(ROWS)
    ids = np.stack([numbers % 7, numbers, numbers % 11], axis=1)
    with TableWriter(path / "all.npy", "rows", ROWS, FIELDS) as file:
        file.write(Rows((numbers % 3 == 0).astype(np.float32), ids, np.ones(ids.shape, np.float32)))
    write_index(path, "train", "rows", FIELDS, ROWS, [file.written])
    return path


def begin(directory: Path, data: Path, ranks: int, number: int, *words: str) -> tuple[Job, Path]:
    """Start a run that records its rows in ``rows-<number>-<rank>.jsonl``. Return it and its output file."""
    script, output = directory / f"{number}.py", directory / f"{number}.txt"
    script.write_text(RECORDER.format(recipes=str(RECIPES), record=directory / f"rows-{number}"))
    with output.open("wb") as file:
        job = start(
            directory / f"job-{number}", "-np", str(ranks), sys.executable, str(script), str(data),
            "--batch-size", "64", "--dim", "2", "--hidden", "4", "--checkpoint-every", "5", "--checkpoints",
            str(directory / "saved"), *words, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return job, output


@pytest.mark.slow
@pytest.mark.limit(600)
@pytest.mark.parametrize("sharded", [(), ("--sharded",)])
def test_each_row_counts_once(sharded: tuple[str, ...], numbered: Path, tmp_path: Path) -> None:
    """The training is killed in mid-epoch on 2 ranks, then on 3, then completed by 2."""
    counted: Counter[int] = Counter()
    done = 0
    for number, ranks in enumerate((2, 3, 2)):
        job, output = begin(tmp_path, numbered, ranks, number, *sharded)
        try:
            if number < 2:
                goal = newest(tmp_path / "saved") + 20
                wait_until(partial(saved_at, tmp_path / "saved", goal), 240)
                assert newest(tmp_path / "saved") >= goal, output.read_text()
                kill(job)
            else:
                assert job.process.wait(240) == 0, output.read_text()
        finally:
            job.end()
        if number:
            resumed = re.search(r"continuing after step \d+: epoch 0, ([\d,]+) of its", output.read_text())
            assert resumed, output.read_text()
            assert int(resumed[1].replace(",", "")) == done
        before, done = done, reached(tmp_path / "saved")
        assert before < done
        assert done < ROWS or number == 2, "killed too late"
        for path in tmp_path.glob(f"rows-{number}-*.jsonl"):
            lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            for position, rows in map(json.loads, lines):
                if position <= done:  # later steps are lost with the killed run and repeated
                    counted.update(rows)
    assert done == ROWS
    assert each_once(counted, ROWS, 2 * 64)


def saved_at(directory: Path, step: int) -> bool:
    """Return True if there is a checkpoint of that step or a later one."""
    return newest(directory) >= step


def reached(directory: Path) -> int:
    """Return how many rows of the epoch the newest checkpoint contains.

    If the job is killed at a certain moment, the newest checkpoint is valid even though its files still have
    their first names: see Note [Manifests].
    """
    files = CheckpointFiles(directory, 2, "checkpoint", ".npz")
    newest = files.find(None)
    assert newest
    with np.load(present_path(files.path(newest.number), newest.token)) as saved:
        position = json.loads(str(saved["position"]))
    return int(position["done"]) or int(position["epoch"]) * ROWS
