"""Images and annotations of a split in COCO's layout, and COCO's metric."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval import mask as rle
from torch import Tensor

from ringdance.data.images import decode
from ringdance.errors import ArgumentError
from ringdance.host.files import check_regular

Array = np.ndarray[Any, Any]
AHEAD = 2  # batches that are decoded while one is trained on
PREPARE = "`ringdance data prepare coco` finds and leaves out what is broken"


class Coco:
    """The images of a split and what is on them; labels are the file's numbers of categories.

    Args:
        directory: in COCO's layout.
        split: such as "train2017".
        masks: decode them too.
        trained_on: leave out images without objects.
    """

    def __init__(self, directory: Path, split: str, masks: bool, trained_on: bool) -> None:
        annotations = directory / "annotations" / f"instances_{split}.json"
        check_regular(annotations)
        self.table = json.loads(annotations.read_bytes())
        self.kinds = {one["id"]: one.get("name") for one in self.table["categories"]}
        objects: dict[int, list[Any]] = {}
        for one in self.table["annotations"]:
            if one["category_id"] not in self.kinds:
                raise ValueError(f"annotation {one['id']} has the unknown category_id {one['category_id']}")
            if not one.get("iscrowd") and all(side > 0 for side in one["bbox"][2:]):
                objects.setdefault(one["image_id"], []).append(one)
        images = sorted(self.table["images"], key=lambda one: int(one["id"]))
        if len({one["id"] for one in images}) < len(images) or min(self.kinds) < 0:
            raise ValueError("the id of an image is there twice, or that of a category below 0")
        self.outlined = all(one.get("segmentation") for one in self.table["annotations"])
        self.images = [one for one in images if one["id"] in objects or not trained_on]
        self.objects, self.masks, self.directory = objects, masks, directory / split
        self.ratios = np.array([one["width"] / one["height"] for one in self.images])

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """Return the number of labels, with 0 for the background."""
        return 1 + max(one["id"] for one in self.table["categories"])

    def count_from_one(self) -> None:
        """Raise the numbers of categories by one, where one of them is the background's 0."""
        for one in self.table["categories"]:
            one["id"] += 1
        for one in self.table["annotations"]:
            one["category_id"] += 1

    def load(self, place: int, flip: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return an image, uint8, shape (3, height, width), and its objects."""
        about = self.images[place]
        found = self.objects.get(about["id"], [])
        try:
            pixels = decode(self._file(about).read_bytes())
            height, width = pixels.shape[:2]
            if (width, height) != (about["width"], about["height"]):
                size = f"{about['width']} x {about['height']}"
                raise ValueError(f"it has {width} x {height} pixels, not {size}")
            outlines = [one["segmentation"] for one in found] if self.masks else []
            masks = masks_of(outlines, height, width)
        except Exception as error:  # decoders raise many
            raise ArgumentError(f"{self._file(about)} cannot be used: {error}. {PREPARE}") from None
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        target = {"labels": torch.tensor([one["category_id"] for one in found], dtype=torch.int64)}
        if self.masks:
            target["masks"] = torch.from_numpy(masks)
        if flip:
            image, boxes[:, [0, 2]] = image.flip(2), width - boxes[:, [2, 0]]
            target |= {"masks": target["masks"].flip(2)} if self.masks else {}
        return image, {"boxes": boxes, **target}

    def _file(self, about: dict[str, Any]) -> Path:
        return self.directory / str(about["file_name"])


def masks_of(outlines: list[Any], height: int, width: int) -> Array:
    """Return masks, uint8, shape (n, height, width), of polygons or run lengths."""
    found = np.zeros((len(outlines), height, width), np.uint8)
    for out, one in zip(found, outlines, strict=True):
        compressed = isinstance(one, dict) and isinstance(one["counts"], str)
        code = one if compressed else rle.frPyObjects(one, height, width)
        out[:] = rle.decode(rle.merge(code) if isinstance(code, list) else code)
    return found


def ahead(tasks: Iterable[Any], load: Any, threads: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each task with what ``load`` returns for its ``numbers``, which threads load meanwhile."""
    waiting: deque[tuple[Any, list[Future[Any]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            waiting.append((task, [pool.submit(load, place) for place in task.numbers]))
            if len(waiting) > AHEAD:
                task, parts = waiting.popleft()
                yield task, [one.result() for one in parts]
        for task, parts in waiting:
            yield task, [one.result() for one in parts]


def results_of(number: int, seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return what was found on an image, as COCO's results files have it."""
    boxes = torch.cat([seen["boxes"][:, :2], seen["boxes"][:, 2:] - seen["boxes"][:, :2]], 1).tolist()
    labels, shares = seen["labels"].int().tolist(), seen["scores"].tolist()
    results: list[dict[str, Any]] = [
        {"image_id": number, "category_id": label, "bbox": box, "score": share}
        for label, box, share in zip(labels, boxes, shares, strict=True)
    ]
    if "masks" in seen and results:
        inside = (seen["masks"][:, 0] > 0.5).numpy().astype(np.uint8)
        for one, code in zip(results, rle.encode(np.asfortranarray(inside.transpose(1, 2, 0))), strict=True):
            one["segmentation"] = code
    return results


def scores(table: dict[str, Any], results: list[Any], kinds: tuple[str, ...]) -> dict[str, float]:
    """Return COCO's average precision of boxes ("bbox AP", "bbox AP50") and masks ("segm ...")."""
    figures: dict[str, float] = {}
    # An id of 0 would be that of an object which was not found.
    objects = [{**one, "id": number} for number, one in enumerate(table["annotations"], 1)]
    truth = COCO({**table, "annotations": objects})
    found = truth.loadRes(results)
    for kind in kinds:
        metric = COCOeval_faster(truth, found, kind)
        metric.evaluate()
        metric.accumulate()
        metric.summarize()
        figures |= {f"{kind} AP": float(metric.stats[0]), f"{kind} AP50": float(metric.stats[1])}
    return figures
