"""Images per second of the detection recipe, compared with torchvision's reference with DDP.

What: training steps of Mask R-CNN on ResNet-50 with a feature pyramid (44 M parameters, 178 MB of gradients,
frozen normalization, SGD), with the recipe and with the loop of torchvision's reference: the model in
DistributedDataParallel over gloo, the losses averaged over the ranks for the log, one step. Both use the same
synthetic images with ten objects each, and draw random regions from the same seeds. Before measuring, both
run the same steps, and their weights must agree.

Why: the reference is the alternative that users have. "x DDP" is the speed as a multiple of the reference's
speed. Larger is better.

How to read: steps alternate. A step's time is the slowest rank's time. Computation dominates on CPUs, so a
ratio of 1 means that nothing is lost.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Report, alternate, ensure_ranks, parser, ratio, run_rank, timed

OURS, DDP = "recipe, ringdance", "reference, DDP, gloo"
CLASSES, OBJECTS, RATE = 91, 10, 1e-4
TOLERANCE = 1e-4  # difference of the weights, relative to their largest change


def images(size: int, batch: int, rank: int) -> Any:
    """Return a batch of noise with rectangles and their masks, as the recipe's loader makes it."""
    import numpy as np
    import torch

    from ringdance.data import Batch

    random = np.random.RandomState(rank)
    pictures, targets = [], []
    for _ in range(batch):
        height, width = size, size * 4 // 3
        corner = random.randint(0, size // 2, (OBJECTS, 2))
        boxes = np.concatenate([corner, corner + random.randint(size // 8, size // 2, (OBJECTS, 2))], 1)
        masks = np.zeros((OBJECTS, height, width), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
            mask[top:bottom, left:right] = 1
        pictures.append(torch.from_numpy(random.randint(0, 256, (3, height, width)).astype(np.uint8)))
        targets.append({
            "boxes": torch.from_numpy(boxes).float(), "masks": torch.from_numpy(masks),
            "labels": torch.from_numpy(random.randint(1, CLASSES, OBJECTS)),
        })  # fmt: skip
    return Batch(pictures, targets, np.arange(batch), 1.0, batch, batch)


def contestants(job: Any, size: int, batch: int) -> dict[str, tuple[Any, Callable[[], None]]]:
    """Return each contestant's model, with the same initial weights, and its step."""
    import torch
    import torch.distributed as dist

    import ringdance.recipes.detection

    sys.path.insert(0, str(Path(ringdance.recipes.detection.__file__).parent))
    import train

    preset = replace(train.PRESETS["torchvision"], image_size=size, longest=2 * size, batch_size=batch)
    options = Namespace(model="maskrcnn", norm="frozen", backbone_weights=None, threads=1)
    torch.manual_seed(0)
    ours = train.DetectionModel(options, preset, CLASSES, torch.device("cpu"), None)
    train.hvd.broadcast_parameters(ours.model.state_dict(), root_rank=0)
    theirs = train.detector("maskrcnn", preset, CLASSES, "frozen", None)
    theirs.load_state_dict(ours.model.state_dict())
    wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), RATE, 0.9, weight_decay=preset.weight_decay)
    data, steps = images(size, batch, job.rank), {OURS: 0, DDP: 0}

    def seed(name: str) -> None:
        torch.manual_seed(1000 * steps[name] + job.rank)
        steps[name] += 1

    def recipe() -> None:
        seed(OURS)
        ours.step(data, RATE)

    def reference() -> None:
        seed(DDP)
        pictures = [image.float() / 255 for image in data.images]
        losses = wrapped(pictures, [{**target} for target in data.labels])
        total = sum(losses.values())
        with torch.no_grad():
            shown = torch.stack([losses[name] for name in sorted(losses)])
            dist.all_reduce(shown)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

    return {OURS: (ours.model, recipe), DDP: (theirs, reference)}


def check(job: Any, found: dict[str, tuple[Any, Callable[[], None]]]) -> float:
    """Run two steps with each. Returns the weights' difference as a share of their change.

    Raises:
        RuntimeError: The share is more than ``TOLERANCE``.
    """
    from torch.nn.utils import parameters_to_vector

    before = parameters_to_vector(found[DDP][0].parameters()).detach().clone()
    for _, step in found.values():
        job.barrier()
        step()
        step()
    ours, theirs = (parameters_to_vector(model.parameters()).detach() for model, _ in found.values())
    apart = float((ours - theirs).abs().max() / (theirs - before).abs().max())
    worst = max(job.gather([apart]))[0]
    if worst > TOLERANCE:
        raise RuntimeError(f"weights differ by {worst:.2g} of their change. At most {TOLERANCE} is expected")
    return worst


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "detection_step.py", seconds=60)
    options.add_argument("--image-size", type=int, default=128, metavar="PIXELS", help="default: 128")
    options.add_argument("--batch", type=int, default=2, metavar="N", help="images per rank; default: 2")
    arguments = options.parse_args()
    ensure_ranks(arguments)

    def measure(job: Any) -> None:
        job.gloo()
        report = Report("detection steps", job)
        report.opening()
        pair = contestants(job, arguments.image_size, arguments.batch)
        apart = check(job, pair)
        turns = {name: timed(step) for name, (_, step) in pair.items()}
        summaries = report.add("Mask R-CNN", "s/step", alternate(job, turns, arguments.seconds))
        rows = []
        for name, one in summaries.items():
            value = report.figure("Mask R-CNN", f"speed {name} / DDP", summaries[DDP].median / one.median)
            cells = [f"{one.median:.3f}", f"{one.p10:.3f}", f"{one.p90:.3f}", str(one.count)]
            rows.append([name, *cells, f"{arguments.batch / one.median:.2f}", ratio(value)])
        report.say()
        report.table(("Mask R-CNN", "median s", "p10", "p90", "steps", "images/s a rank", "x DDP"), rows)
        report.say(f"weights after two steps are {apart:.1g} of their change apart")
        report.write(arguments.json)

    run_rank(measure, ["ringdance.torch"])


if __name__ == "__main__":
    main()
