"""`ringdance data prepare coco` leaves out and names what is broken, and keeps the rest unchanged."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdance.data.prepare.coco import run_lengths
from ringdance.tools.cli import main

Image = pytest.importorskip("PIL.Image")
BOX = [2, 3, 10, 8]
OUTLINE = [[2, 3, 12, 3, 12, 11]]


def annotation(number: int, **changes: Any) -> dict[str, Any]:
    fields = {"id": number, "image_id": 1, "category_id": 7, "bbox": BOX, "area": 80, "iscrowd": 0}
    return {**fields, "segmentation": OUTLINE, **changes}


def runs(*counts: Any, size: Any = (24, 32)) -> dict[str, Any]:
    return {"size": [*size], "counts": counts[0] if isinstance(counts[0], str) else [*counts]}


WHOLE = [
    annotation(1), annotation(2, segmentation=runs(100, 68, 600), iscrowd=1),
    annotation(3, bbox=[0, 0, 32.5, 24]), annotation(4, segmentation=runs("T3T2hb0")),
    annotation(5, image_id=2), {"id": 6, "image_id": 2, "category_id": 9, "bbox": BOX},
]  # fmt: skip
BROKEN = {
    "outside the image": annotation(20, bbox=[28, 3, 10, 8]),
    "no area": annotation(21, bbox=[2, 3, 0, 8]),
    "not four numbers": annotation(22, bbox=[2, 3, float("nan"), 8]),
    "not four numbers: None": annotation(23, bbox=None),
    "unknown category_id 8": annotation(24, category_id=8),
    "unknown image_id 99": annotation(25, image_id=99),
    "entry 12 repeats the id of an earlier annotation": annotation(1, bbox=[0, 0, 1, 1]),
    "a polygon is not three": annotation(27, segmentation=[[2, 3, 12, 3]]),
    "a polygon is not three or more pairs": annotation(28, segmentation=[[2, 3, 12, 3, 12, 11, 4]]),
    "run lengths do not add up to 768 pixels": annotation(30, segmentation=runs(100, 68)),
    "run lengths do not add up": annotation(31, segmentation=runs("T3T2hb")),
    "neither polygons nor run lengths of": annotation(32, segmentation=runs(768, size=(32, 24))),
    "neither": annotation(33, segmentation="T3"),
    "id is not a non-negative integer": {"image_id": 1},
    "unknown image_id [1]": annotation(35, image_id=[1]),
    "not four numbers: [1": annotation(36, bbox=[10**400, 1, 1, 1]),
    "far outside": annotation(37, segmentation=[[1e9, 3, 12, 3, 12, 11]]),
    "run lengths": annotation(38, segmentation=runs(100.5, 667.5)),
    "neither 0 nor 1": annotation(39, iscrowd="0"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write two intact images, and a missing, a truncated, a wrongly sized and a duplicate one.

    All of them have objects.
    """
    directory = tmp_path / "coco"
    (directory / "annotations").mkdir(parents=True)
    (directory / "train2017").mkdir()
    size = {"width": 32, "height": 24}
    images = [{"id": number, "file_name": f"{number}.jpg", **size} for number in (2, 1, 3, 4, 5, 1)]
    for number in (1, 2, 4, 5):
        file = io.BytesIO()
        shape = (32, 24, 3) if number == 5 else (24, 32, 3)
        Image.fromarray(np.random.RandomState(number).randint(0, 255, shape, np.uint8)).save(file, "JPEG")
        data = file.getvalue()
        (directory / "train2017" / f"{number}.jpg").write_bytes(data[:300] if number == 4 else data)
    on_broken = [annotation(40 + number, image_id=number) for number in (3, 4, 5)]
    table = {
        "info": {"year": 2017}, "images": images, "annotations": [*WHOLE, *BROKEN.values(), *on_broken],
        "categories": [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog"}, {"id": 7, "name": "again"}],
    }  # fmt: skip
    (directory / "annotations" / "instances_train2017.json").write_text(json.dumps(table))
    return directory


def problems(directory: Path) -> list[list[str]]:
    return [line.split("\t") for line in (directory / "train2017.problems.tsv").read_text().splitlines()]


def test_what_is_broken_is_left_out_and_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "checked"
    assert main(["data", "prepare", "coco", str(source), str(target), "--max-broken", "100"]) == 3
    listed = problems(target)
    for why, entry in BROKEN.items():
        number = str(entry.get("id", "entry 19"))
        assert any(kind == "annotation" and its == number and why in text for kind, its, text in listed), why
    reasons = {"3": "No such file", "4": "cannot be decoded", "5": "24 x 32 pixels instead of 32 x 24"}
    for number, why in reasons.items():
        assert any(kind == "image" and its == number and why in text for kind, its, text in listed), why
    assert len(listed) == len(BROKEN) + 5
    made = json.loads((target / "annotations" / "instances_train2017.json").read_text())
    assert [entry["id"] for entry in made["images"]] == [1, 2]
    assert made["annotations"][:5] == WHOLE[:5]
    assert made["annotations"][5] == {**WHOLE[5], "area": 80, "iscrowd": 0}
    assert len(made["annotations"]) == 6
    assert [entry["name"] for entry in made["categories"]] == ["cat", "dog"]
    assert made["info"] == {"year": 2017}
    assert (target / "train2017" / "1.jpg").read_bytes() == (source / "train2017" / "1.jpg").read_bytes()
    assert "2 images with 6 objects of 2 categories" in capsys.readouterr().err
    # The prepared data set must have no problems of its own.
    assert main(["data", "prepare", "coco", str(target), str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / "train2017.problems.tsv").exists()


def test_too_much_that_is_broken_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "checked"
    assert main(["data", "prepare", "coco", str(source), str(target)]) == 2
    total = len(BROKEN) + 5
    assert f"too many broken items: {total} entries in train2017" in capsys.readouterr().err
    assert not (target / "annotations" / "instances_train2017.json").exists()
    assert len(problems(target)) == total


def one_image(directory: Path, seed: int, name: str = "1.jpg") -> Path:
    (directory / "annotations").mkdir(parents=True)
    (directory / "val").mkdir()
    Image.fromarray(np.full((24, 32, 3), seed, np.uint8)).save(directory / "val" / "1.jpg")
    table = {
        "images": [{"id": 1, "file_name": name, "width": 32, "height": 24}],
        "annotations": [annotation(seed)], "categories": [{"id": 7, "name": "cat"}],
    }  # fmt: skip
    (directory / "annotations" / "instances_val.json").write_text(json.dumps(table))
    return directory


def test_annotations_go_with_their_images_after_another_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other, target = one_image(tmp_path / "a", 1), one_image(tmp_path / "b", 2), tmp_path / "made"
    assert main(["data", "prepare", "coco", str(first), str(target)]) == 0
    assert main(["data", "prepare", "coco", str(other), str(target)]) == 0
    assert sorted(path.name for path in target.iterdir()) == ["annotations", "val"]
    assert (target / "val").resolve() == (other / "val").resolve()
    (target / "val").unlink()
    (target / "val").mkdir()
    assert main(["data", "prepare", "coco", str(first), str(target)]) == 2
    assert "is not a link and may contain other images" in capsys.readouterr().err
    table = json.loads((target / "annotations" / "instances_val.json").read_text())
    assert [one["id"] for one in table["annotations"]] == [2], "a refused run changes nothing"

    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "annotations").symlink_to(first / "annotations")
    assert main(["data", "prepare", "coco", str(first), str(tmp_path / "linked")]) == 2
    assert (first / "annotations" / "instances_val.json").exists()


@pytest.mark.parametrize("name", ["a\0b", "\ud800.jpg", "fifo", ".."])
def test_a_name_that_no_image_has_is_listed(name: str, tmp_path: Path) -> None:
    source = one_image(tmp_path / "a", 1, name)
    os.mkfifo(source / "val" / "fifo")
    assert main(["data", "prepare", "coco", str(source), str(tmp_path / "made")]) == 3
    [line] = (tmp_path / "made" / "val.problems.tsv").read_text().splitlines()
    assert line.startswith("image\t1\t")


def test_outlines_that_are_empty_or_slivers_keep_their_objects(tmp_path: Path) -> None:
    """An empty outline counts as none, and only the polygon with two points is dropped and named."""
    source, target = one_image(tmp_path / "a", 1), tmp_path / "made"
    path = source / "annotations" / "instances_val.json"
    table = json.loads(path.read_text())
    outlines = [[], None, [*OUTLINE, [2, 3, 12, 3]], [[], *OUTLINE, "odd"]]
    table["annotations"] = [annotation(n, segmentation=outline) for n, outline in enumerate(outlines)]
    path.write_text(json.dumps(table))
    assert main(["data", "prepare", "coco", str(source), str(target), "--max-broken", "3"]) == 3
    made = json.loads((target / "annotations" / "instances_val.json").read_text())["annotations"]
    assert [entry.get("segmentation") for entry in made] == [None, None, OUTLINE]
    assert not any("segmentation" in entry for entry in made[:2])
    listed = [line.split("\t") for line in (target / "val.problems.tsv").read_text().splitlines()]
    assert [line[:2] for line in listed] == [["polygon", "2"], ["polygon", "3"], ["annotation", "3"]]


@pytest.mark.parametrize(("content", "told"), [
    (None, "No such file"), ("[", "is not JSON"), ("[]", "lists of images, annotations, categories"),
    ('{"images": [], "annotations": {}, "categories": []}', "lists of images"),
])
def test_a_file_of_something_else_is_named(
    content: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "coco"
    (source / "annotations").mkdir(parents=True)
    if content is not None:
        (source / "annotations" / "instances_val.json").write_text(content)
    assert main(["data", "prepare", "coco", str(source), str(tmp_path / "made"), "--split", "val"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "instances_val.json" in error
    assert main(["data", "prepare", "coco", str(source), str(source)]) == 2


def test_run_lengths_of_compressed_text() -> None:
    assert run_lengths("T3T2hb0") == [100, 68, 600]
    mask = pytest.importorskip("faster_coco_eval").mask
    inside = np.asfortranarray(np.random.RandomState(0).randint(0, 2, (24, 32)).astype(np.uint8))
    text = mask.encode(inside)["counts"]
    flat = np.flatnonzero(np.diff(inside.ravel(order="F")))
    ends = [*(flat + 1).tolist(), 768]
    expected = np.diff([0, *ends]).tolist()
    lengths = run_lengths(text.decode() if isinstance(text, bytes) else text)
    assert lengths == (expected if not inside[0, 0] else [0, *expected])
