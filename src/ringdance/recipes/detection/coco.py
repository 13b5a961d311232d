"""Read images and annotations in COCO's directory layout, and compute COCO's metrics."""

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

Array = np.ndarray[Any, Any]
AHEAD = 2  # number of batches to decode in advance
PREPARE = "To leave out broken entries, run `ringdance data prepare coco`."


class Coco:
    """A split's images, and the objects in them, labeled with their category ids.

    Args:
        directory: Data set directory in COCO's layout.
        split: Name of the split, such as "train2017".
        masks: If True, return objects with masks, and not only with boxes.
        trained_on: If True, leave out images without objects.
    """

    def __init__(self, directory: Path, split: str, masks: bool, trained_on: bool) -> None:
        annotations = directory / "annotations" / f"instances_{split}.json"
        if not annotations.is_file():  # reading a FIFO could block forever
            raise ArgumentError(f"{annotations} does not exist or is not a regular file.")
        self.table = json.loads(annotations.read_bytes())
        self.kinds = {entry["id"]: entry.get("name") for entry in self.table["categories"]}
        objects: dict[int, list[Any]] = {}
        for item in self.table["annotations"]:
            if item["category_id"] not in self.kinds:
                raise ValueError(f"annotation {item['id']} has the unknown category_id {item['category_id']}")
            if not item.get("iscrowd") and all(side > 0 for side in item["bbox"][2:]):
                objects.setdefault(item["image_id"], []).append(item)
        images = sorted(self.table["images"], key=lambda entry: int(entry["id"]))
        if len({entry["id"] for entry in images}) < len(images) or min(self.kinds) < 0:
            raise ValueError("image ids must be unique, and category ids must not be negative")
        self.outlined = all(entry.get("segmentation") for entry in self.table["annotations"])
        self.images = [entry for entry in images if entry["id"] in objects or not trained_on]
        self.objects, self.masks, self.directory = objects, masks, directory / split
        self.ratios = np.array([entry["width"] / entry["height"] for entry in self.images])

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """Number of classes, including class 0, the background."""
        return 1 + max(one["id"] for one in self.table["categories"])

    def count_from_one(self) -> None:
        """Add 1 to all category ids, for data in which a category has id 0, which means background here."""
        for entry in self.table["categories"]:
            entry["id"] += 1
        for entry in self.table["annotations"]:
            entry["category_id"] += 1

    def load(self, place: int, flip: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return an image (uint8, shape (3, height, width)) and its objects."""
        about = self.images[place]
        objects = self.objects.get(about["id"], [])
        try:
            pixels = decode(self._file(about).read_bytes())
            height, width = pixels.shape[:2]
            if (width, height) != (about["width"], about["height"]):
                size = f"{about['width']} x {about['height']}"
                raise ValueError(f"it has {width} x {height} pixels instead of {size}")
            outlines = [item["segmentation"] for item in objects] if self.masks else []
            masks = masks_of(outlines, height, width)
        except Exception as error:  # decoders raise many kinds of exceptions
            raise ArgumentError(f"{self._file(about)} cannot be used: {error}. {PREPARE}") from None
        boxes = torch.tensor([item["bbox"] for item in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        target = {"labels": torch.tensor([item["category_id"] for item in objects], dtype=torch.int64)}
        if self.masks:
            target["masks"] = torch.from_numpy(masks)
        if flip:
            image, boxes[:, [0, 2]] = image.flip(2), width - boxes[:, [2, 0]]
            target |= {"masks": target["masks"].flip(2)} if self.masks else {}
        return image, {"boxes": boxes, **target}

    def _file(self, about: dict[str, Any]) -> Path:
        return self.directory / str(about["file_name"])


def masks_of(outlines: list[Any], height: int, width: int) -> Array:
    """Decode polygons or run-length encodings to masks (uint8, shape (n, height, width))."""
    masks = np.zeros((len(outlines), height, width), np.uint8)
    for out, outline in zip(masks, outlines, strict=True):
        compressed = isinstance(outline, dict) and isinstance(outline["counts"], str)
        code = outline if compressed else rle.frPyObjects(outline, height, width)
        out[:] = rle.decode(rle.merge(code) if isinstance(code, list) else code)
    return masks


def ahead(tasks: Iterable[Any], load: Any, threads: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each task with the results of ``load`` for its ``numbers``. Threads load in advance."""
    waiting: deque[tuple[Any, list[Future[Any]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            waiting.append((task, [pool.submit(load, place) for place in task.numbers]))
            if len(waiting) > AHEAD:
                task, parts = waiting.popleft()
                yield task, [future.result() for future in parts]
        for task, parts in waiting:
            yield task, [future.result() for future in parts]


def results_of(number: int, seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the detections in image ``number``, in COCO's results format."""
    boxes = torch.cat([seen["boxes"][:, :2], seen["boxes"][:, 2:] - seen["boxes"][:, :2]], 1).tolist()
    labels, shares = seen["labels"].int().tolist(), seen["scores"].tolist()
    results: list[dict[str, Any]] = [
        {"image_id": number, "category_id": label, "bbox": box, "score": share}
        for label, box, share in zip(labels, boxes, shares, strict=True)
    ]
    if "masks" in seen and results:
        inside = (seen["masks"][:, 0] > 0.5).numpy().astype(np.uint8)
        for item, code in zip(results, rle.encode(np.asfortranarray(inside.transpose(1, 2, 0))), strict=True):
            item["segmentation"] = code
    return results


def scores(table: dict[str, Any], results: list[Any], kinds: tuple[str, ...]) -> dict[str, float]:
    """Return COCO's average precision for boxes ("bbox AP", "bbox AP50") and masks ("segm ...")."""
    metrics: dict[str, float] = {}
    # Number annotations from 1, because the metric takes a match with id 0 for an undetected object.
    objects = [{**annotation, "id": number} for number, annotation in enumerate(table["annotations"], 1)]
    truth = COCO({**table, "annotations": objects})
    detections = truth.loadRes(results)
    for kind in kinds:
        metric = COCOeval_faster(truth, detections, kind)
        metric.evaluate()
        metric.accumulate()
        metric.summarize()
        metrics |= {f"{kind} AP": float(metric.stats[0]), f"{kind} AP50": float(metric.stats[1])}
    return metrics
