"""The detection recipe: a step, evaluation as in one process, resumption, weights, and what it refuses."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchvision")
pytest.importorskip("faster_coco_eval")

import torch
from faster_coco_eval import mask as rle
from PIL import Image
from torchvision import models

import ringdance.recipes.detection
import ringdance.torch as hvd

DIRECTORY = Path(ringdance.recipes.detection.__file__).parent
RESNET50 = DIRECTORY.with_name("resnet50")


@pytest.fixture(scope="module")
def recipe() -> Iterator[Any]:
    """Return the script, with the modules next to it."""
    hvd.init()
    before = {name: sys.modules.pop(name, None) for name in ("presets", "batches", "coco", "train")}
    sys.path.insert(0, str(DIRECTORY))
    yield importlib.import_module("train")
    sys.path.remove(str(DIRECTORY))
    sys.modules.update({name: value for name, value in before.items() if value})


IMAGES = 7


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a directory shared by all ranks, in COCO's layout: wide and high colored rectangles on noise."""
    directory = Path(hvd.broadcast_object(str(tmp_path)))
    if hvd.rank() == 0:
        random = np.random.RandomState(0)
        (directory / "annotations").mkdir()
        (directory / "train2017").mkdir()
        images, objects = [], []
        for number in range(IMAGES):
            width, height = (80, 60) if number % 2 else (60, 80)
            pixels = random.randint(0, 90, (height, width, 3)).astype(np.uint8)
            for category in (3, 8):
                x, y, w, h = (*random.randint(0, 30, 2).tolist(), *random.randint(15, 30, 2).tolist())
                pixels[y : y + h, x : x + w, category % 3] = 250
                outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
                objects.append({
                    "id": len(objects) + 1, "image_id": 10 + number, "category_id": category, "iscrowd": 0,
                    "bbox": [x, y, w, h], "area": w * h, "segmentation": outline,
                })  # fmt: skip
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=95)
            (directory / "train2017" / f"{number}.jpg").write_bytes(file.getvalue())
            about = {"id": 10 + number, "file_name": f"{number}.jpg", "width": width, "height": height}
            images.append(about)
        categories = [{"id": 3, "name": "square"}, {"id": 8, "name": "box"}]
        table = {"images": images, "annotations": objects, "categories": categories}
        (directory / "annotations" / "instances_train2017.json").write_text(json.dumps(table))
    hvd.broadcast_object(None)
    return directory


def run(recipe: Any, monkeypatch: pytest.MonkeyPatch, photos: Path, *words: str) -> None:
    line = f"--preset laptop --data {photos} --image-size 64 --width 16 --batch-size 2 --precision float32"
    monkeypatch.setattr(sys, "argv", ["train.py", *line.split(), "--log-every", "1", *words])
    monkeypatch.setattr(recipe.hvd, "shutdown", lambda: None)
    recipe.main()
    hvd.broadcast_object(None)


def evaluations(text: str) -> list[str]:
    return [line.rpartition(",")[0].partition(": ")[2] for line in text.splitlines() if "bbox AP" in line]


@pytest.mark.limit(200)
def test_it_resumes_and_evaluates_what_it_exports(
    recipe: Any, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = f"--model maskrcnn --epochs 2 --checkpoints {photos / 'saved'}".split()
    log = f"--sample-log {photos / 'log'}".split()
    run(recipe, monkeypatch, photos, *same, *log, "--steps", "1")
    run(recipe, monkeypatch, photos, *same, *log, "--export", str(photos / "model"))
    told = capsys.readouterr().out
    run(recipe, monkeypatch, photos, *same, "--evaluate")
    weights = str(photos / "model" / "weights.pt")
    run(recipe, monkeypatch, photos, "--model", "maskrcnn", "--weights", weights, "--evaluate")
    again = capsys.readouterr().out
    if hvd.rank() == 0:
        assert "continuing after step 1" in told
        assert " mask " in told
        expected = evaluations(told)[-1]
        assert evaluations(again) == [expected, expected]
        assert f"of {IMAGES} images" in expected
        assert "segm AP50 " in expected
        lines = [json.loads(item) for path in (photos / "log").iterdir() for item in path.open()]
        for epoch in (0, 1):
            used = [number for line in lines if line["epoch"] == epoch for number in line["samples"]]
            assert sorted(used) == list(range(IMAGES))
    with pytest.raises(SystemExit, match="made with other options: model was maskrcnn, now fasterrcnn"):
        run(recipe, monkeypatch, photos, *same[2:], "--evaluate")
    other = ["--preset", "torchvision", "--backbone", "resnet18_fpn", "--optimizer", "adamw"]
    with pytest.raises(SystemExit, match="made with other options: anchor was 6, now 32"):
        run(recipe, monkeypatch, photos, *same, *other, "--evaluate")
    changed(photos, "more", categories=[{"id": 9, "name": "ball"}, {"id": 3}, {"id": 8}])
    with pytest.raises(SystemExit, match="made with other options: labels was 9, now 10"):
        run(recipe, monkeypatch, photos, *same, "--split", "more", "--evaluate")


def small_model(recipe: Any, photos: Path, kind: str, **changes: Any) -> Any:
    preset = replace(
        recipe.PRESETS["laptop"], image_size=64, longest=107, width=16, precision="float32", **changes
    )
    check = recipe.Coco(photos, "train2017", False, False)
    options = Namespace(model=kind, norm="group", backbone_weights=None, threads=2)
    torch.manual_seed(1)
    return recipe.DetectionModel(options, preset, check.classes, torch.device("cpu"), check), preset


@pytest.mark.limit(200)
def test_an_evaluation_is_one_process_and_its_detections_are_found(recipe: Any, photos: Path) -> None:
    """With a model that knows the images' contents, each image counts once, whichever rank had it."""
    model, _ = small_model(recipe, photos, "maskrcnn")
    check, seen = model.check, []

    class Knowing(torch.nn.Module):
        def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            sums = [float(item.sum()) for item in images]
            seen.extend(sums)
            masks = recipe.Coco(photos, "train2017", True, False)
            for place in range(len(masks)):
                image, target = masks.load(place)
                if float(model.pixels(image).sum()) == sums[0]:
                    wrong = target["labels"] if place % 3 else target["labels"].flip(0)
                    inside = target["masks"][:, None].float()
                    shares = torch.linspace(0.9, 0.5, len(wrong)) - place / 100
                    return [{"boxes": target["boxes"], "labels": wrong, "scores": shares, "masks": inside}]
            raise AssertionError("an image that is not of the split")

    model.model = Knowing()
    result = model.evaluate()
    assert result["count"] == IMAGES
    assert len(set(seen)) == len(seen) == len(range(hvd.rank(), IMAGES, hvd.size()))
    alone = []
    for place in range(IMAGES):
        [one] = model.model([model.pixels(check.load(place)[0])])
        alone += recipe.results_of(check.images[place]["id"], one)
    expected = recipe.scores(check.table, alone, ("bbox", "segm"))
    assert {name: result[name] for name in expected} == expected
    assert 0.2 < result["segm AP"] < 0.9, "a third of the images have wrong labels"
    assert result["bbox AP50"] == pytest.approx(result["segm AP50"])


def test_ranks_keep_the_same_weights_and_clip_the_same_norm(recipe: Any, photos: Path) -> None:
    model, preset = small_model(recipe, photos, "maskrcnn", clip=0.5, optimizer="sgd", weight_decay=0.0)
    data = recipe.Coco(photos, "train2017", True, True)
    before = [item.detach().clone() for item in model.trained]
    for batch in recipe.Batches(data, preset, 0, 2):
        model.step(batch, 0.1)
        break
    pairs = zip(before, model.trained, strict=True)
    moved = torch.stack([(value - two.detach()).square().sum() for value, two in pairs])
    assert float(moved.sum().sqrt()) == pytest.approx(0.05, rel=1e-3), "rate times the maximum norm"
    sums = hvd.allgather_object([float(item.detach().double().sum()) for item in model.trained])
    assert sums[0] == sums[-1]


def changed(photos: Path, split: str, **parts: Any) -> None:
    """Write a split's annotations: train2017's, with ``parts`` replaced."""
    directory = photos / "annotations"
    hvd.barrier()  # wait until no rank is reading the old annotations
    if hvd.rank() == 0:
        table = json.loads((directory / "instances_train2017.json").read_text()) | parts
        (directory / f"instances_{split}.json").write_text(json.dumps(table))
        if not (photos / split).exists():
            (photos / split).symlink_to(photos / "train2017")
    hvd.broadcast_object(None)


def test_a_category_of_number_0_is_not_the_background(recipe: Any, photos: Path) -> None:
    table = recipe.Coco(photos, "train2017", False, True).table
    less = {
        "categories": [{**category, "id": category["id"] - 3} for category in table["categories"]],
        "annotations": [{**item, "category_id": item["category_id"] - 3} for item in table["annotations"]],
    }
    changed(photos, "zero", **less)
    some = [annotation for annotation in less["annotations"] if annotation["category_id"]]
    changed(photos, "five", annotations=some, categories=less["categories"][1:])
    options = Namespace(data=photos, split="five", validation_split="zero", model="maskrcnn")
    data, check, _ = recipe.splits(options)
    assert sorted(check.load(0)[1]["labels"].tolist()) == [1, 6]
    assert data.load(0)[1]["labels"].tolist() == [6], "the same class number in both splits"
    assert data.classes == check.classes == 7
    assert [category["id"] for category in check.table["categories"]] == [1, 6]


def test_an_object_of_number_0_counts(recipe: Any, photos: Path) -> None:
    table = recipe.Coco(photos, "train2017", False, True).table
    objects = [{**value, "id": number} for number, value in enumerate(table["annotations"])]
    results = [
        {"image_id": item["image_id"], "category_id": item["category_id"], "bbox": item["bbox"], "score": 0.9}
        for item in objects
    ]
    assert recipe.scores({**table, "annotations": objects}, results, ("bbox",))["bbox AP"] == pytest.approx(1)


def test_masks_of_compressed_run_lengths(recipe: Any) -> None:
    inside = np.random.RandomState(0).randint(0, 2, (24, 32)).astype(np.uint8)
    code = rle.encode(np.asfortranarray(inside))
    text = {"size": [24, 32], "counts": bytes(code["counts"]).decode()}
    square = [[2, 3, 12, 3, 12, 11, 2, 11]]
    masks = sys.modules["coco"].masks_of([text, square], 24, 32)
    assert np.array_equal(masks[0], inside)
    assert masks[1].sum() == 80


def test_flipped_objects_are_where_they_are_seen(recipe: Any, photos: Path) -> None:
    data = recipe.Coco(photos, "train2017", True, True)
    image, target = data.load(0)
    flipped, other = data.load(0, True)
    assert torch.equal(flipped.flip(2), image)
    for boxes, masks in ((target["boxes"], target["masks"]), (other["boxes"], other["masks"])):
        for box, mask in zip(boxes.int().tolist(), masks, strict=True):
            ys, xs = mask.nonzero(as_tuple=True)
            assert [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1] == box


@pytest.mark.limit(200)
def test_its_parameters_are_those_of_torchvision(recipe: Any, tmp_path: Path) -> None:
    preset = replace(recipe.PRESETS["8xV100"], image_size=64, longest=64)
    theirs = models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=9)
    frozen = {"norm_layer": recipe.FrozenBatchNorm2d}
    theirs.backbone.body = models._utils.IntermediateLayerGetter(
        models.resnet50(weights=None, **frozen), {f"layer{one}": str(one - 1) for one in range(1, 5)}
    )
    ours = recipe.detector("maskrcnn", preset, 9, "frozen", None)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    torch.save(theirs.state_dict(), tmp_path / "whole.pt")
    head = lambda name: "_predictor." in name  # noqa: E731
    assert recipe.load_weights(ours, str(tmp_path / "whole.pt"), "--weights", head) == []
    other = recipe.detector("maskrcnn", preset, 4, "frozen", None)
    fresh = recipe.load_weights(other, str(tmp_path / "whole.pt"), "--weights", head)
    assert {name.split(".")[1] for name in fresh} == {"box_predictor", "mask_predictor"}

    torch.save(models.resnet50(weights=None).state_dict(), tmp_path / "body.pt")
    made = recipe.detector("fasterrcnn", preset, 9, "frozen", str(tmp_path / "body.pt"))
    named = dict(made.named_parameters())
    assert not named["backbone.body.layer1.0.conv1.weight"].requires_grad
    assert named["backbone.body.layer2.0.conv1.weight"].requires_grad
    saved = torch.load(tmp_path / "body.pt")["layer2.0.conv1.weight"]
    assert torch.equal(named["backbone.body.layer2.0.conv1.weight"], saved)
    with pytest.raises(SystemExit, match=r"--weights .*body.pt: \d+ entries belong to another model"):
        recipe.load_weights(made, str(tmp_path / "body.pt"), "--weights", head)
    with pytest.raises(SystemExit, match=r"--weights .*nowhere: No such file"):
        recipe.load_weights(made, str(tmp_path / "nowhere"), "--weights", head)
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"model": None}, tmp_path / "none.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("text.pt", "none.pt", "pipe.pt"):
        with pytest.raises(SystemExit, match=rf"--weights .*{name}: it is not a file from torch.save"):
            recipe.load_weights(made, str(tmp_path / name), "--weights", head)


def test_what_cannot_be_read_is_named(
    recipe: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="--backbone resnet51_fpn is unknown"):
        run(recipe, monkeypatch, photos, "--backbone", "resnet51_fpn")
    with pytest.raises(SystemExit, match=r"nothing2017\.json does not exist"):
        run(recipe, monkeypatch, photos, "--split", "nothing2017")
    table = recipe.Coco(photos, "train2017", False, True).table
    objects, images = table["annotations"], table["images"]
    for number, text in enumerate(("[]", "[" * 100_000, "{}", "\x00")):
        if hvd.rank() == 0:
            (photos / "annotations" / f"instances_bad{number}.json").write_text(text)
        hvd.broadcast_object(None)
        with pytest.raises(SystemExit, match=r"annotations are malformed.*ringdance data prepare coco"):
            run(recipe, monkeypatch, photos, "--split", f"bad{number}")
    for told, parts in {
        "unknown category_id 5": {"annotations": [{**objects[0], "category_id": 5}]},
        "not subscriptable": {"images": [1]},
        "division by zero": {"images": [{**images[0], "height": 0}]},
        "image ids must be unique": {"images": [*images, images[0]]},
    }.items():
        changed(photos, "bad", **parts)
        with pytest.raises(SystemExit, match=f"annotations are malformed.*{told}"):
            run(recipe, monkeypatch, photos, "--split", "bad")
    bare = [{name: value for name, value in object_.items() if name != "segmentation"} for object_ in objects]
    changed(photos, "bare", annotations=bare)
    with pytest.raises(SystemExit, match="no segmentation, which --model maskrcnn requires"):
        run(recipe, monkeypatch, photos, "--model", "maskrcnn", "--validation-split", "bare")
    changed(photos, "renamed", categories=[{"id": 3, "name": "box"}, {"id": 8, "name": "square"}])
    with pytest.raises(SystemExit, match="category 3 has another name in renamed than in train2017"):
        run(recipe, monkeypatch, photos, "--validation-split", "renamed")
    changed(photos, "larger", images=[{**image, "width": 81} for image in images])
    with pytest.raises(ValueError, match=r"0.jpg cannot be used: it has 60 x 80 pixels instead of 81 x 80"):
        recipe.Coco(photos, "larger", False, True).load(0)
    changed(photos, "lost", images=[{**images[0], "file_name": "9.jpg"}])
    with pytest.raises(ValueError, match=r"9.jpg cannot be used: .*No such file"):
        recipe.Coco(photos, "lost", False, True).load(0)
