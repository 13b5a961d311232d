"""The DeepFM recipe on PyTorch: its learning rates train the table, and match the comparison's."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import ringdance.torch as hvd
from ringdance import recipes
from ringdance.data import planted
from ringdance.data.tables.writing import TableWriter, write_index

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ROWS, CHECKED, SMALL = 40_000, 8_000, 20_011
BATCH = 256 // SIZE * SIZE  # global batch size


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the recipe's modules by name. Other recipes have modules with some of the same names."""
    benchmark = Path(__file__).parents[2] / "benchmarks" / "strategies"
    for path in (Path(recipes.__file__).parent / "deepfm", benchmark):
        monkeypatch.syspath_prepend(str(path))
    names = ("rates", "loop", "train_torch", "strategies", "strategies_torch")
    others = {name: sys.modules.pop(name, None) for name in names}
    yield Namespace(**{name: importlib.import_module(name) for name in names})
    for name, other in others.items():
        sys.modules.pop(name)
        if other is not None:
            sys.modules[name] = other


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create rows with a planted signal, one copy for each rank."""
    for split, count, day in (("train", ROWS, 0), ("validation", CHECKED, 1)):
        with TableWriter(tmp_path / f"{split}.npy", "rows", count, 39) as file:
            for part in planted(count, day=day):
                file.write(part.rows(SMALL))
        write_index(tmp_path, split, "rows", 39, SMALL, [file.written])
    return tmp_path


def trained(recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> float:
    """Train for one epoch with the recipe's loop and return the AUC."""
    return evaluations(recipe, data, monkeypatch, words)[-1]


def evaluations(recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> list[float]:
    """Train with the recipe's loop and return the AUC of each evaluation."""
    line = f"{data} --batch-size {BATCH // SIZE} --hidden 32 {words}"
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *line.split()])
    monkeypatch.setattr(recipe.loop.hvd, "shutdown", lambda: None)
    results: list[dict[str, float]] = []
    evaluate = recipe.loop.TableModel.evaluate

    def noted(self: Any) -> dict[str, float]:
        results.append(evaluate(self))
        return results[-1]

    monkeypatch.setattr(recipe.loop.TableModel, "evaluate", noted)
    recipe.loop.main("", recipe.train_torch.TorchTableModel)
    return [tensor["auc"] for tensor in results]


def test_the_default_trains_the_table(recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = trained(recipe, data, monkeypatch, "--table-rate 0")
    auc = trained(recipe, data, monkeypatch, "")
    assert layers < 0.6, "without training the table, the layers see random rows"
    assert auc > 0.735, "0.72 at rate 0.02 with an initial sum of 0.1 for batch means; the optimum: 0.89"


@pytest.mark.slow
@pytest.mark.limit(400)
def test_the_default_is_stable_for_epochs(recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No evaluation is far below the best so far, either at the end of the warm-up or later."""
    words = f"--batch-size {2048 // SIZE} --hidden 400,400,400 --epochs 6 --evaluate-every 4"
    aucs = np.array(evaluations(recipe, data, monkeypatch, words))
    assert (np.maximum.accumulate(aucs) - aucs).max() < 0.02, aucs
    assert aucs[-1] > 0.76, "scikit-learn's LogisticRegression reaches 0.755 on these rows at its best C"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_of_one_class_end_all_ranks_before_the_first_step(
    recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """Their AUC is not a number, so there is no best model, and nothing is exported."""
    stored = np.load(data / f"{split}.npy", mmap_mode="r+")
    stored["label"] = 1
    stored.flush()
    with pytest.raises(SystemExit, match=rf"^{split}: all {len(stored):,} labels are 1\. AUC needs rows"):
        trained(recipe, data, monkeypatch, f"--export {data / 'model'}")
    assert not (data / "model").exists()


def test_another_seed_is_not_gone_on_with(recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed orders the rows differently, so an epoch would use some rows twice."""
    same = f"--checkpoints {hvd.broadcast_object(str(data / 'kept'))} --steps 2"
    trained(recipe, data, monkeypatch, same)
    with pytest.raises(SystemExit, match="seed was 0, now 1"):
        trained(recipe, data, monkeypatch, f"{same} --seed 1")


def test_an_export_that_cannot_begin_ends_all_ranks(
    recipe: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 creates the directory. The others do not wait for it in the exchange of the table."""
    shared = Path(hvd.broadcast_object(str(data)))
    if RANK == 0:
        (shared / ".model.partial").write_text("a file is in the way")
    hvd.broadcast_object(None)
    with pytest.raises(SystemExit, match=r"--export .*File exists"):
        trained(recipe, data, monkeypatch, f"--sharded --steps 2 --export {shared / 'model'}")


def test_a_step_is_that_of_the_comparison(recipe: Any, data: Path) -> None:
    """Adagrad on batch sums, with a suitable initial sum, equals the other strategies' Adagrad on means."""
    options = Namespace(data=str(data), batch_size=BATCH, hidden=[8])
    options.sizes = recipe.strategies.Sizes(SMALL, 39, 4, (8,), BATCH)
    ours = recipe.strategies.RecipeSteps(
        recipe.strategies.Place(RANK, SIZE, [], [], options), recipe.train_torch.TorchTableModel
    )
    recipe.strategies_torch.fill(ours.model.layers, ours.first)
    model = recipe.strategies_torch.Model(options.sizes)
    first = model.table.weight.detach().clone()
    other = recipe.strategies_torch.Steps(recipe.strategies.Place(0, 1, [], [], options), model, model)
    for _ in range(4):
        assert ours.step() == other.step() == BATCH
    moved, expected = torch.from_numpy(ours.model.table.values) - first, model.table.weight.detach() - first
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)
