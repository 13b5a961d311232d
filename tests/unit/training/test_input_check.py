"""Loaders that `ringdance bench input` watches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdance.data import Table, TableLoader
from ringdance.data.loader import Batch
from ringdance.data.tables import Rows, TableBatch
from ringdance.data.tables.writing import TableWriter
from ringdance.errors import ArgumentError
from ringdance.training.loaders import input_check
from ringdance.training.loaders.input_check import (
    INPUT_MARK,
    WatchedLoader,
    bytes_of,
    noise_of,
    samples_of,
    watch_input,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_other_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedLoader, "_measured", None)


class Loader:
    """Three numbered batches of 4 samples. Counts how many were drawn."""

    batch_size = 4

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        for number in range(3):
            self.drawn += 1
            yield np.full((4, 2), number), np.zeros(4)


def run(part: str, capfd: pytest.CaptureFixture[str]) -> tuple[Loader, list[int], dict[str, float]]:
    loader = Loader()
    watched = WatchedLoader(loader, part, 0.01)
    seen: list[int] = []

    def train() -> None:
        while True:  # epochs
            for images, _ in watched:
                seen.append(int(images[0, 0]))
                if len(seen) % 5 == 0:
                    break

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 0
    assert (len(watched), watched.batch_size) == (3, 4)
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith(INPUT_MARK))
    (row,) = json.loads(line.removeprefix(INPUT_MARK))
    return loader, seen, row


def test_without_a_measurement_it_is_the_loader_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader()
    assert watch_input(loader) is loader
    monkeypatch.setenv("RINGDANCE_INPUT_CHECK", "both")
    assert isinstance(watch_input(loader), WatchedLoader)


def test_the_loader_alone_yields_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    loader, seen, row = run("loader", capfd)
    assert seen == []
    assert 4 * loader.drawn > row["samples"] >= 12  # without the warm-up
    assert row["samples"] % 4 == 0
    assert row["seconds"] >= 0.01


def test_the_step_alone_has_several_batches_in_turn(capfd: pytest.CaptureFixture[str]) -> None:
    loader, seen, row = run("step", capfd)
    assert seen == ([0, 1, 2] * len(seen))[: len(seen)]  # also when the script starts another epoch
    assert loader.drawn == 3
    assert row["samples"] < 4 * len(seen)
    assert row["noise"] > 0


def test_the_step_alone_does_not_wait_for_a_slow_loader(capfd: pytest.CaptureFixture[str]) -> None:
    """The step only uses the batches that the loader yields within the time, and waits for no other."""
    drawn = []

    def slow() -> Iterator[Any]:
        for number in range(100):
            time.sleep(0.02)
            drawn.append(number)
            yield np.zeros((4, 2))

    with pytest.raises(SystemExit):
        list(WatchedLoader(slow(), "step", 0.1))
    (row,) = json.loads(capfd.readouterr().out.split(INPUT_MARK)[1])
    assert 1 <= len(drawn) <= 7
    assert row["samples"] / row["seconds"] > 5 * 4 / 0.02


def test_what_is_kept_of_batches_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [Batch(np.full((4, 2, 2, 3), n), np.zeros(4), None, 1.0, 4, 4) for n in range(100)]
    for limit, different in ((1 << 28, 48), (4 * bytes_of(batches[0]), 4), (1, 1)):
        monkeypatch.setattr(input_check, "_KEPT_BYTES", limit)
        watched = WatchedLoader(batches, "step", 100.0).drawn()
        seen = [next(watched).images[0, 0, 0, 0] for _ in range(3 * different)]
        assert seen == list(range(different)) * 3
    array = np.zeros((5, 4), np.float32)
    assert [bytes_of(batch) for batch in ((array, array), {"x": [array]}, 7, "text", batches[0])] == [
        160, 80, 0, 0, batches[0].images.nbytes + 32,
    ]  # fmt: skip


def test_the_noise_is_that_of_the_mean() -> None:
    assert noise_of(np.arange(50) * 0.25) == 0.0
    random = np.random.default_rng(0)
    shares = []
    for _ in range(400):  # the true mean is 1, and it is within the interval in 95% of the cases
        times = np.concatenate([[0.0], np.cumsum(random.exponential(1.0, 200))])
        mean = times[-1] / 200
        shares.append(abs(mean - 1) <= noise_of(times) * mean)
    assert 0.9 < np.mean(shares) < 0.99
    assert noise_of([0.0, 1.0, 3.0, 4.0]) == pytest.approx(4.30 * 0.57735 / 3**0.5 / (4 / 3), rel=1e-3)


def test_both_go_through_the_epochs(capfd: pytest.CaptureFixture[str]) -> None:
    loader, seen, _ = run("both", capfd)
    assert len(seen) >= 6
    assert seen == ([0, 1, 2, 0, 1] * len(seen))[: len(seen)]
    assert loader.drawn == len(seen)


def test_short_batches_are_left_out() -> None:
    batches = [Batch(np.zeros((n, 2, 2, 3)), None, None, 1.0, 0, 2 * n) for n in (4, 4, 3)]
    watched = WatchedLoader(batches, "both", 100.0).batches()
    seen = [next(watched).count for _ in range(6)]
    assert seen == [8] * 6


def test_rows_of_a_table_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = Rows(np.zeros(100, np.float32), np.zeros((100, 2), np.int64), np.ones((100, 2), np.float32))
    with TableWriter(tmp_path / "all.npy", "rows", 100, 2) as file:
        file.write(rows)
    loader = TableLoader(Table.open(tmp_path / "all.npy", table_size=1), 50)
    with pytest.raises(SystemExit):
        list(WatchedLoader(loader, "loader", 0.01))
    (row,) = json.loads(capfd.readouterr().out.split(INPUT_MARK)[1])
    assert row["unit"] == "rows"
    assert row["samples"] >= 150
    assert row["samples"] % 50 == 0


def test_only_the_first_loader_is_measured() -> None:
    first, second = (WatchedLoader(Loader(), "both", 100.0) for _ in range(2))
    next(iter(first))
    assert len(list(second)) == 3


def test_a_loader_without_batches_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="no batches"):
        list(WatchedLoader([], "both", 1.0))


def test_samples_of_all_kinds_of_batches() -> None:
    images = np.zeros((5, 2, 2))
    assert samples_of(Batch(images, np.zeros(5), None, 1.0, 5, 5)) == 5
    assert samples_of(TableBatch(np.zeros(5), np.zeros((5, 2)), None, 1.0, 5, 5)) == 5
    assert samples_of((images, np.zeros(5))) == 5
    assert samples_of([images, np.zeros(5)]) == 5
    assert samples_of({"x": (images, 1), "y": 2}) == 5
    assert samples_of(["a", "b", "c"]) == 3
    assert samples_of(images) == 5
    assert samples_of(7) == 1


def test_batches_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6))
    assert samples_of(next(iter(WatchedLoader(torch.utils.data.DataLoader(data, 3), "both", 1.0)))) == 3
