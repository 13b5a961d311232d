"""The recipe: a step on all ranks equals one process's on the whole batch; evaluation, best model, scores."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import shutil
import sys
import zlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import ringdance.recipes.resnet50
import ringdance.torch as hvd
from ringdance import data
from ringdance.data import Batch
from ringdance.data.order import block

sys.path.insert(0, str(Path(ringdance.recipes.resnet50.__file__).parent))  # where a copy finds presets.py

import train_torch
from presets import PRESETS
from shared import begin_with

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
RATE = 0.1


@pytest.mark.parametrize(("passes", "count"), [(3, 7), (2, 1)])
def test_short_batches_and_passes_are_weighted(passes: int, count: int) -> None:
    """With 7 images, ranks have unequal shares, some below passes. With 1, other ranks only have padding."""
    torch.manual_seed(RANK)
    preset = replace(PRESETS["laptop"], momentum=0.0, weight_decay=0.0, label_smoothing=0.1)
    options = Namespace(accumulate=passes, width=4, model=None, seed=0)
    training = train_torch.TorchImageModel(options, preset, 5, torch.device("cpu"))
    for module in training.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # otherwise, gradients of most layers are 0
    training.equal()
    training.model.eval()  # in training mode, each rank normalizes by its own batch statistics
    twin = copy.deepcopy(training.model)

    random = np.random.RandomState(3)
    images = torch.from_numpy(random.randint(0, 256, (count, 3, 40, 40), np.uint8))
    labels = torch.from_numpy(random.randint(0, 5, count))
    start, stop = block(count, RANK, SIZE)
    mine = slice(start, stop) if stop > start else slice(0, 1)
    batch = Batch(images[mine], labels[mine], labels[mine], (stop - start) * SIZE / count, count, count)
    training.step(batch, RATE)

    logits = twin((images.float() - training.mean) / training.deviation)
    nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()
    for (name, module), other in zip(training.model.named_parameters(), twin.parameters(), strict=True):
        assert other.grad.abs().max() > 0, name
        expected = other.detach() - RATE * other.grad
        scale = float((RATE * other.grad).abs().max())
        torch.testing.assert_close(module.detach(), expected, rtol=1e-5, atol=1e-3 * scale, msg=name)


IMAGES = {"train": 8 * SIZE + 3, "validation": 7}


def make_photos(own: Path) -> Path:
    """Return a directory shared by all ranks, with a data set in which the color determines the class."""
    image = pytest.importorskip("PIL.Image")
    directory = Path(hvd.broadcast_object(str(own)))
    if RANK == 0:
        for split, count in IMAGES.items():
            samples = []
            for number in range(count):
                file = io.BytesIO()
                image.new("RGB", (40, 40), (80 * (number % 3), 255 - 9 * number, 40)).save(file, "JPEG")
                samples.append((file.getvalue(), number % 3))
            data.write(directory / "data", samples, split=split)
    hvd.broadcast_object(None)
    return directory


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a directory with a data set, for one test."""
    return make_photos(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, *words: str) -> None:
    line = f"--preset laptop --data {directory / 'data'} --image-size 40 --width 4 --batch-size 4 --rate 0.05"
    monkeypatch.setattr(sys, "argv", ["train_torch.py", *line.split(), *words])
    monkeypatch.setattr(train_torch.hvd, "shutdown", lambda: None)
    train_torch.main()
    hvd.broadcast_object(None)


def evaluations(text: str) -> list[str]:
    """Return the metrics of each printed evaluation, without the time."""
    return [line.rpartition(",")[0].partition(": ")[2] for line in text.splitlines() if ": top-1" in line]


def words_of(photos: Path) -> list[str]:
    """Return the options shared by a training and the evaluation of its checkpoints."""
    return f"--epochs 3 --checkpoints {photos / 'saved'}".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return photos with a model trained on them and exported, and the training's output.

    The training was stopped and resumed.
    """
    photos, told = make_photos(tmp_path_factory.mktemp("trained")), io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(told):
        run(monkeypatch, photos, *words_of(photos), "--steps", "3")
        run(monkeypatch, photos, *words_of(photos), "--export", str(photos / "model"))
    return photos, told.getvalue()


def test_evaluation_alone_is_that_of_the_training(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best model and the exported model get the same result as during training."""
    photos, told = trained
    same = words_of(photos)
    run(monkeypatch, photos, *same, "--evaluate")
    weights = str(photos / "model" / "weights.pt")
    run(monkeypatch, photos, "--weights", weights, "--evaluate")
    again = capsys.readouterr().out
    scores = scored(monkeypatch, photos, "validation")
    if RANK == 0:
        assert "top-5" not in told, "there are three classes"
        result = evaluations(told)
        assert len(result) == 3, told
        best = max(result, key=lambda line: float(line.split()[1].rstrip("%")))
        assert evaluations(again) == [best, best], (told, again)
        score = np.loadtxt(scores, skiprows=1, dtype=str, delimiter="\t")
        right = sum(
            int(label) == np.argmax(row.astype(float))
            for label, row in zip(score[:, 1], score[:, 2:], strict=True)
        )
        assert best.split()[1] == f"{right / IMAGES['validation']:.2%}"
        assert json.loads((photos / "model" / "model.json").read_text())["image_size"] == 40
    hvd.broadcast_object(None)
    with pytest.raises(SystemExit) as problem:
        run(monkeypatch, photos, *same, "--optimizer", "lars", "--width", "8")
    assert "model was ResNet-50 of width 4, now ResNet-50 of width 8; optimizer was sgd, now lars" in str(
        problem.value
    )


def test_export_replaces_only_an_earlier_export(
    trained: tuple[Path, str], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := photos / "mine").mkdir(exist_ok=True)
    (mine / "thesis.txt").write_text("years of work")
    hvd.broadcast_object(None)
    for target in (mine, photos, photos / "kept", photos / "data" / "train.json"):
        with pytest.raises(SystemExit, match="--export"):
            run(monkeypatch, photos, "--checkpoints", str(photos / "kept"), "--export", str(target))
    assert (mine / "thesis.txt").read_text()
    target = trained[0] / "model"
    before = (target / "weights.pt").read_bytes()
    assert sorted(path.name for path in target.iterdir())[0] == "model.json"
    hvd.broadcast_object(None)
    run(monkeypatch, photos, "--steps", "1", "--export", f"{target}/")
    assert sorted(path.name for path in target.iterdir())[0] == "model.json"
    assert (target / "weights.pt").read_bytes() != before
    assert not [path for path in trained[0].iterdir() if path.name.startswith(".")]


def test_what_more_ranks_cannot_finish_is_evaluated(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continue when less than one batch of all ranks is left of the last epoch."""
    same = ["--epochs", "2", "--checkpoints", str(photos / "kept")]
    run(monkeypatch, photos, *same, "--steps", "3")
    hvd.broadcast_object(None)
    checkpoint = max((photos / "kept").glob("checkpoint-*"))
    with np.load(checkpoint) as saved:
        arrays = dict(saved)
    at = json.loads(str(arrays["position"]))
    at |= {"done": IMAGES["train"] - 2, "best": 0.0}
    hvd.broadcast_object(None)
    if RANK == 0:
        with checkpoint.open("wb") as file:
            np.savez(file, **{**arrays, "position": np.array(json.dumps(at))})
        about = checkpoint.with_name(f".{checkpoint.name}.json")
        info = json.loads(about.read_text()) | {
            "sizes": [checkpoint.stat().st_size], "checksums": [zlib.crc32(checkpoint.read_bytes())]
        }  # fmt: skip
        about.write_text(json.dumps(info))
    hvd.broadcast_object(None)
    capsys.readouterr()
    run(monkeypatch, photos, *same)
    if RANK == 0:
        told = capsys.readouterr().out
        assert "continuing after step 3" in told
        assert "after epoch 2: top-1" in told


def test_a_worse_model_does_not_replace_the_best(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if killed after the best model was saved and before the checkpoint that records it."""
    same = ["--checkpoints", str(photos / "kept"), "--epochs", "2"]
    run(monkeypatch, photos, *same, "--steps", "2")
    if RANK == 0:
        shutil.copytree(photos / "kept", photos / "before")
    monkeypatch.setattr(train_torch.TorchImageModel, "evaluate", lambda self: {"top1": 0.9, "count": 7})
    run(monkeypatch, photos, *same)
    if RANK == 0:
        for path in (photos / "kept").iterdir():
            if path.name.lstrip(".").startswith("checkpoint"):
                path.unlink()
        for path in (photos / "before").iterdir():
            if path.name.lstrip(".").startswith("checkpoint"):
                shutil.copy(path, photos / "kept")
    hvd.broadcast_object(None)
    kept = {path.name for path in (photos / "kept").glob("best-*")}
    monkeypatch.setattr(train_torch.TorchImageModel, "evaluate", lambda self: {"top1": 0.5, "count": 7})
    run(monkeypatch, photos, *same, "--rate", "0.01")
    assert {path.name for path in (photos / "kept").glob("best-*")} == kept
    with np.load(photos / "kept" / kept.pop()) as saved:
        assert json.loads(str(saved["position"]))["best"] == 0.9


def test_a_training_that_diverges_ends(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rate", "1e30", "--epochs", "3", "--log-every", "1", "--checkpoints", str(photos / "kept")]
    with pytest.raises(SystemExit, match=r"The loss is (nan|inf) at step"):
        run(monkeypatch, photos, *words, "--sample-log", str(photos / "new" / "used"))
    hvd.broadcast_object(None)
    assert not list((photos / "kept").glob("*")), "it must not leave a checkpoint"
    assert len(list((photos / "new" / "used").iterdir())) == SIZE


def scored(monkeypatch: pytest.MonkeyPatch, photos: Path, split: str) -> Path:
    """Run the scoring script on each rank separately."""
    output = photos / f"scores{RANK}.tsv"
    words = [str(photos / "model"), str(photos / "data"), "--split", split, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["score.py", *words])
    score = importlib.import_module("ringdance.recipes.score")
    monkeypatch.setattr(score.hvd, "size", lambda: 1)  # each rank separately
    score.main()
    monkeypatch.undo()
    return output


def test_photographs_are_scored_as_prepared_ones(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Images are turned as their EXIF says, a broken file is named, and a pipe does not block."""
    image, score = pytest.importorskip("PIL.Image"), importlib.import_module("ringdance.recipes.score")
    photos, _ = trained
    new = tmp_path / f"new{RANK}"
    new.mkdir()
    pixels = np.random.RandomState(0).randint(0, 256, (40, 60, 3), np.uint8)
    image.fromarray(pixels).save(new / "upright.png")
    turned, orientation = image.fromarray(np.ascontiguousarray(np.rot90(pixels))), image.Exif()
    orientation[0x0112] = 6  # the top is on the right
    turned.save(new / "turned.png", exif=orientation)
    os.mkfifo(new / "pipe.jpg")
    words = ["score.py", str(photos / "model"), str(new), "--output", str(tmp_path / f"scores{RANK}")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(score.hvd, "size", lambda: 1)  # each rank separately
    monkeypatch.setattr(score.hvd, "rank", lambda: 0)
    score.main()
    assert "no image has a label" in capsys.readouterr().err
    lines = [line.split("\t") for line in (tmp_path / f"scores{RANK}").read_text().splitlines()]
    assert [line[:2] for line in lines] == [["file", "label"], ["turned.png", "-"], ["upright.png", "-"]]
    assert lines[1][2:] == lines[2][2:]
    (new / "broken.jpg").write_bytes(b"no image")
    (new / "linked.jpg").symlink_to("upright.png")  # a valid image next to it
    with pytest.raises(SystemExit, match="3"):
        score.main()
    told = capsys.readouterr().err
    assert "3 images in" in told
    assert f"skipped: {new}/broken.jpg: cannot identify" in told
    again = [line.split("\t") for line in (tmp_path / f"scores{RANK}").read_text().splitlines()]
    assert again == [lines[0], ["linked.jpg", *lines[1][1:]], *lines[1:]]
    for path in new.iterdir():
        path.unlink()
    with pytest.raises(SystemExit, match="2"):
        score.main()
    assert f"{new}: no index for the split 'train' (train.json is missing)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words[:2], str(photos / "data"), "--split", "val"])
    with pytest.raises(SystemExit, match="2"):
        score.main()
    assert "Existing splits: train, validation" in capsys.readouterr().err


def test_weights_of_other_classes_leave_the_head_fresh_and_others_are_refused(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(photos / "other.pt")
    torch.manual_seed(5)
    other: Any = train_torch.resnet50(7, 4)
    if RANK == 0:
        torch.save(other.state_dict(), path)
    options = Namespace(accumulate=1, width=4, model=None, seed=0)
    training = train_torch.TorchImageModel(options, PRESETS["laptop"], 3, torch.device("cpu"))
    assert "except fc.weight, fc.bias" in begin_with(Namespace(weights=path, evaluate=False), training, 3)
    training.equal()
    torch.testing.assert_close(training.model.layer3[1].conv2.weight, other.layer3[1].conv2.weight)
    assert training.model.fc.weight.shape[0] == 3
    training = train_torch.TorchImageModel(replaced(options), PRESETS["laptop"], 3, torch.device("cpu"))
    with pytest.raises(SystemExit, match=r"other\.pt: not for this model: \d+ entries belong"):
        begin_with(Namespace(weights=path, evaluate=False), training, 3)


def replaced(given: Namespace) -> Namespace:
    return Namespace(**{**vars(given), "width": 8})
