"""Train Faster R-CNN or Mask R-CNN with torchvision on COCO, or on other data in COCO's layout.

    ringdance data prepare coco /data/coco /data/checked
    ringdance run -np 2 python train.py --preset laptop --data /data/checked --epochs 2
    ringdance run -np 8 python train.py --model maskrcnn --preset 8xV100 --data /data/checked \\
        --backbone-weights resnet50.pt --checkpoints run1 --precision float16
    ringdance run -H node1:8,node2:8,node3:8 python train.py --preset 24xV100 --data /data/checked

--data DIR must have COCO's layout: annotations in DIR/annotations/instances_train2017.json, the images in
DIR/train2017, and the same for val2017.

`presets.py` contains the presets, which are hyperparameters of published runs with their results. Options
override individual values. A preset's learning rate applies to its global batch. With a different number of
processes, the rate is scaled in proportion to the batch.

--backbone-weights FILE takes the state_dict() of a torchvision classifier, written by torch.save(). Weights
from the resnet50 recipe also work, because its parameters have the same names. The backbone's normalization,
its stem and its first stage are then frozen. Without this option, the backbone uses GroupNorm, and all layers
are trained. --weights FILE takes a complete detector, such as torchvision's own, to train it further or to
--evaluate it. For torchvision's detectors, add --norm frozen.

If there are GPUs, each rank uses the GPU whose number is its local rank.

Each batch contains either wide or tall images, and each image is used once per epoch. With --checkpoints, the
same command resumes a run that was stopped or killed, even with a different number of processes.

Every --log-every steps, rank 0 prints the mean losses, the images per second in total and per rank, the share
of time that training waited for images, the elapsed time including earlier runs, and the time left. With
--price-per-hour, the price of all machines together, it also prints the cost so far.

After every --evaluate-every epochs, rank 0 prints COCO's average precision (AP, and AP50 at an overlap of
0.5). Each image is evaluated by one rank. If there is no validation split, the training images are
evaluated instead, and the output says so. The best model on the validation split is kept in the --checkpoints
directory, and --export writes its weights.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import EpochSteps, Part  # type: ignore[import-not-found]  # in this directory
from presets import PRESETS, Preset  # type: ignore[import-not-found]
from torch import Tensor, nn

import ringdance.torch as hvd
from ringdance.data import Batch
from ringdance.errors import ArgumentError
from ringdance.recipes import torch_state
from ringdance.recipes.options import Options, amount, count, number
from ringdance.recipes.training import TRAINED_ON, Position, Training
from ringdance.training.gradients.cores import own_cores

try:
    from coco import PREPARE, Coco, ahead, results_of, scores  # type: ignore[import-not-found]
    from torchvision import models
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign
except (ImportError, RuntimeError) as error:
    raise SystemExit(
        f"this script requires faster-coco-eval and a torchvision built for this torch: {error}. "
        "Install them with: pip install torchvision faster-coco-eval"
    ) from None

Array = np.ndarray[Any, Any]


# Data -----------------------------------------------------------------------------------------------------


class Batches:
    """Yields this rank's batches of an epoch. See ``EpochSteps``."""

    def __init__(self, data: Coco, preset: Preset, seed: int, threads: int) -> None:
        self.data, self.preset, self.seed, self.threads = data, preset, seed, threads
        self.set_epoch(0)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Set the epoch, and how many of the epoch's images have already been used."""
        ratios, size = self.data.ratios, self.preset.batch_size
        # Whether an image is flipped does not depend on the rank, so resumed runs use the same flips.
        self.flips = np.random.RandomState([self.seed, epoch, 1]).random_sample(len(ratios)) < 0.5
        self.plan = EpochSteps(ratios, size, self.seed, epoch, hvd.rank(), hvd.size(), done)

    def load(self, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return an image and its objects, with this epoch's augmentation."""
        return self.data.load(place, self.preset.flip and self.flips[place])

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch. Images and labels have one element per image."""
        for part, loaded in ahead(self.plan, self.load, self.threads):
            images, objects = zip(*loaded, strict=True)
            used = np.array(part.numbers if part.weight else [-1])
            yield Batch(images, objects, used, part.weight, part.position, part.count)


# Model ----------------------------------------------------------------------------------------------------


def detector(name: str, preset: Preset, classes: int, norm: str, weights: str | None) -> nn.Module:
    """Build torchvision's FasterRCNN or MaskRCNN on a ResNet with a feature pyramid.

    If the width is 256, the parameters have the same names and shapes as in torchvision's own detectors.
    """
    width, levels = preset.width, ["0", "1", "2", "3"]
    body = _body(preset.backbone, norm, weights)
    channels = [body.fc.in_features >> shift for shift in (3, 2, 1, 0)]
    stages = {f"layer{stage + 1}": level for stage, level in enumerate(levels)}
    backbone = BackboneWithFPN(body, stages, channels, width, norm_layer=None if norm == "frozen" else group)
    # torchvision's values are for images of 800 pixels. Scale them with the size of the anchors.
    scale = 7 * preset.anchor
    pooled = functools.partial(MultiScaleRoIAlign, levels, sampling_ratio=2, canonical_scale=scale)
    sizes = tuple((preset.anchor << level,) for level in range(5))
    kept = 4 * preset.regions if preset.regions < 512 else 2000
    options: dict[str, Any] = {
        "min_size": preset.image_size, "max_size": preset.longest,
        "rpn_anchor_generator": detection.anchor_utils.AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5),
        "rpn_pre_nms_top_n_train": kept, "rpn_post_nms_top_n_train": kept,
        "box_roi_pool": pooled(output_size=7), "box_batch_size_per_image": preset.regions,
        "box_head": detection.faster_rcnn.TwoMLPHead(width * 49, 4 * width),
        "box_predictor": detection.faster_rcnn.FastRCNNPredictor(4 * width, classes),
    }  # fmt: skip
    if name == "fasterrcnn":
        return detection.FasterRCNN(backbone, **options)
    return detection.MaskRCNN(
        backbone, mask_roi_pool=pooled(output_size=14),
        mask_head=detection.mask_rcnn.MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(width, width, classes), **options,
    )  # fmt: skip


def _body(backbone: str, norm: str, weights: str | None) -> Any:
    """Build the ResNet. With weights from a file, the stem and the first stage are frozen."""
    name = backbone.removesuffix("_fpn")
    names = [one for one in models.list_models(module=models) if "resne" in one]
    if name not in names or name == backbone:
        raise SystemExit(f"--backbone {backbone} is unknown. Use {', '.join(f'{one}_fpn' for one in names)}.")
    body: Any = models.get_model(
        name, weights=None, norm_layer=group if norm == "group" else FrozenBatchNorm2d
    )
    if weights:
        load_weights(body, weights, "--backbone-weights", lambda name: name.startswith("fc."))
        for name, parameter in body.named_parameters():
            parameter.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
    return body


def group(channels: int) -> nn.Module:
    """Return a GroupNorm layer, which normalizes each image independently of the batch."""
    return nn.GroupNorm(min(32, channels // 4), channels)


def load_weights(model: nn.Module, file: str, option: str, is_head: Callable[[str], bool]) -> list[str]:
    """Load a state dict, but skip a head with a different shape. Returns the names of skipped parameters.

    Raises:
        SystemExit: The file cannot be read, or contains another model.
    """
    try:
        return torch_state.load_weights(model, file, is_head)
    except (OSError, ValueError) as error:
        hint = ". Weights with batch normalization require --norm frozen" if ".bn" in str(error) else ""
        why = getattr(error, "strerror", None) or error
        raise SystemExit(f"{option} {file}: {why}{hint}") from None


class DetectionModel:
    """This rank's model, optimizer and loss scaler. See Note [Models of recipes]."""

    framework = "torch"

    def __init__(
        self, given: argparse.Namespace, preset: Preset, classes: int, device: torch.device, check: Coco
    ) -> None:
        self.device, self.preset, self.check, self.threads = device, preset, check, given.threads
        self.kinds = ("bbox", "segm") if given.model == "maskrcnn" else ("bbox",)
        made = detector(given.model, preset, classes, given.norm, given.backbone_weights)
        self.model: Any = made.to(device)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        decay = preset.weight_decay
        self.inner: torch.optim.Optimizer = (
            torch.optim.SGD(self.trained, 0.0, 0.9, weight_decay=decay) if preset.optimizer == "sgd"
            else torch.optim.AdamW(self.trained, 0.0, weight_decay=decay)
        )  # fmt: skip
        named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.optimizer = hvd.DistributedOptimizer(self.inner, named)
        self.scaler = torch.amp.GradScaler(device.type, enabled=preset.precision == "float16")
        self.sums: dict[str, Any] = {}

    def pixels(self, image: Tensor) -> Tensor:
        """Copy an image to the device, and scale the pixel values to the range 0 to 1."""
        return image.to(self.device, non_blocking=True).float() / 255

    def step(self, batch: Batch, rate: float) -> None:
        """Update the model with one batch. The gradients are averaged over the images of all ranks."""
        for value in self.inner.param_groups:
            value["lr"] = rate
        objects = [{name: value.to(self.device) for name, value in target.items()} for target in batch.labels]
        with torch_state.autocast(self.device, self.preset.precision):
            losses = self.model([self.pixels(image) for image in batch.images], objects)
        loss = torch.stack([*losses.values()]).sum()
        for name, value in {"loss": loss, **losses, "images": loss.new_ones(())}.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach() * len(batch.images)
        scaled: Any = self.scaler.scale(loss * batch.weight)
        scaled.backward()
        self.scaler.unscale_(self.optimizer)
        if self.preset.clip:
            nn.utils.clip_grad_norm_(self.trained, self.preset.clip)
        self.scaler.step(self.optimizer)  # in float16, all ranks skip the step if a gradient overflows
        self.scaler.update()
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, float]:
        """Return this rank's mean losses per image since the last call. Synchronizes with the GPU."""
        sums, self.sums = {name: float(total) for name, total in self.sums.items()}, {}
        images = sums.pop("images")
        return {_TITLES[name]: total / images for name, total in sums.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return COCO's metrics. Each rank evaluates a share of the images.

        The images are evaluated one at a time, so the result does not depend on the number of ranks.
        """
        own = [Part([place], 1.0, 0, 1) for place in range(hvd.rank(), len(self.check), hvd.size())]
        results: list[tuple[int, list[Any]]] = []
        model = self.model.eval()
        for part, [(image, _)] in ahead(own, self.check.load, self.threads):
            with torch_state.autocast(self.device, self.preset.precision):
                [seen] = model([self.pixels(image)])
            number = self.check.images[part.numbers[0]]["id"]
            seen = {name: one.float().cpu() for name, one in seen.items()}
            results.append((number, results_of(number, seen)))
        model.train()
        every = sorted((row for part in hvd.allgather_object(results) for row in part), key=lambda x: x[0])
        metrics: dict[str, float] = {}
        with hvd.pause_stall_check("COCO's metric"):
            if hvd.rank() == 0:
                entries = [entry for _, image in every for entry in image]
                metrics = scores(self.check.table, entries, self.kinds) | {"count": len(every)}
            metrics = hvd.broadcast_object(metrics)
        return metrics

    def described(self, at: Position, found: dict[str, float]) -> str:
        """Format the metrics of an evaluation."""
        shares = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if "AP" in name)
        when = f"after epoch {at.epoch}" if at.step else "before any training"
        return f"{when}: {shares}"

    def average_statistics(self) -> None:
        """Do nothing, because the normalization layers have no running statistics to update."""

    def state(self) -> dict[str, Array]:
        """Return copies of the arrays for a checkpoint: model, optimizer and loss scaler."""
        return torch_state.arrays_of(self.inner, self.scaler, model=self.model)

    def restore(self, state: dict[str, Array]) -> None:
        """Restore a state returned by ``state``."""
        torch_state.restore(state, self.inner, self.scaler, model=self.model)

    def export(self, directory: Path) -> None:
        """Write the state dict to weights.pt, which --weights can load."""
        torch.save(self.model.state_dict(), directory / "weights.pt")


_TITLES = {
    "loss": "loss", "loss_objectness": "rpn", "loss_rpn_box_reg": "rpn box", "loss_classifier": "class",
    "loss_box_reg": "box", "loss_mask": "mask",
}  # fmt: skip


# Training -------------------------------------------------------------------------------------------------


def options() -> Options:
    """Return the command-line parser."""
    made = Options(description=__doc__)
    add = made.add_argument
    add("--model", default="fasterrcnn", choices=("fasterrcnn", "maskrcnn"))
    add("--data", type=Path, required=True, metavar="DIR", help="data set in COCO's layout (see above)")
    add("--split", default="train2017", help="split to train on; default: train2017")
    text = "split to evaluate; default: val2017, or --split if DIR has no val2017"
    add("--validation-split", metavar="SPLIT", help=text)
    add("--backbone", metavar="NAME", help="torchvision ResNet, such as resnet50_fpn")
    add("--backbone-weights", metavar="FILE", help="weights of a classifier (see above)")
    add("--weights", metavar="FILE", help="weights of a detector, except a head of another size")
    text = "default: frozen with --backbone-weights, otherwise group"
    add("--norm", choices=("frozen", "group"), help=text)
    add("--width", type=count, metavar="CHANNELS", help="channels in the pyramid and the heads")
    add("--warmup-steps", type=number(int, 0), metavar="N", help="steps of linear warm-up")
    add("--clip", type=amount, metavar="NORM", help="maximum norm of the gradients; 0: no limit")
    add("--image-size", type=number(int, 32), metavar="PIXELS", help="target length of the shorter side")
    add("--longest", type=count, metavar="PIXELS", help="limit for the longer side; default: in proportion")
    made.add_images(PRESETS, ("sgd", "adamw"))
    return made


def splits(given: argparse.Namespace) -> tuple[Coco, Coco, str]:
    """Open the splits for training and evaluation. Also returns the name of the evaluated split."""
    masks, checked = given.model == "maskrcnn", given.validation_split
    if not checked:
        has = (given.data / "annotations" / "instances_val2017.json").exists()
        checked = "val2017" if has else given.split
    try:
        data, check = Coco(given.data, given.split, masks, True), Coco(given.data, checked, False, False)
        if masks and not (data.outlined and check.outlined):
            raise ArgumentError("an annotation has no segmentation, which --model maskrcnn requires")
        if other := {key for key in data.kinds.keys() & check.kinds if data.kinds[key] != check.kinds[key]}:
            raise ArgumentError(f"category {min(other)} has another name in {checked} than in {given.split}")
        if 0 in (*data.kinds, *check.kinds):
            data.count_from_one()
            check.count_from_one()
    except (OSError, ArgumentError) as error:
        raise SystemExit(f"--data {given.data}: {error}. For the required layout, see --help.") from None
    except Exception as error:  # unexpected JSON causes many kinds of exceptions
        raise SystemExit(f"--data {given.data}: annotations are malformed: {error!r}. {PREPARE}") from None
    if not len(data):
        raise SystemExit(f"--data {given.data}: the images of {given.split} have no objects.")
    return data, check, TRAINED_ON if checked == given.split else checked


def main() -> None:
    """Run the training script."""
    given = options().read()
    hvd.init()
    given.threads = given.threads or max(1, own_cores())
    given.norm = given.norm or ("frozen" if given.backbone_weights else "group")
    preset = PRESETS[given.preset].overridden(given)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(given.seed)  # the same weights on all ranks; reseeded below so that sampling differs
    data, check, split = splits(given)
    model = DetectionModel(given, preset, max(data.classes, check.classes), device, check)
    if given.weights:
        load_weights(model.model, given.weights, "--weights", lambda name: "_predictor." in name)
    hvd.broadcast_parameters(model.model.state_dict(), root_rank=0)
    torch.manual_seed(given.seed + hvd.rank())
    train(given, preset, model, data, split)
    hvd.shutdown()


def train(given: argparse.Namespace, preset: Preset, model: DetectionModel, data: Coco, split: str) -> None:
    """Train, or only evaluate, starting from the newest checkpoint if there is one. Then export the model."""
    batches = Batches(data, preset, given.seed, given.threads)
    batch = preset.batch_size * hvd.size()
    same: dict[str, Any] = {
        "model": given.model, "backbone": preset.backbone, "width": preset.width, "norm": given.norm,
        "anchor": preset.anchor, "labels": max(data.classes, model.check.classes),
        "optimizer": preset.optimizer, "precision": preset.precision,
    }  # fmt: skip
    if not given.evaluate:  # a run can only resume within an epoch if the order is the same
        same |= {"images": len(data), "batch_size": preset.batch_size, "seed": given.seed}
    training = Training(
        given, model, same, "images", len(data), preset.epochs, split, f"{model.kinds[-1]} AP"
    )
    training.print(
        f"{given.model} on {preset.backbone} by torchvision on {model.device.type}: {hvd.size()} ranks, "
        f"batch {batch:,}, {preset.optimizer}, {preset.precision}, {len(data):,} images, "
        f"{preset.epochs:g} epochs\n"
        f"preset {given.preset} ({preset.source}): {preset.expected}"
    )
    peak = preset.rate_for(batch) if given.rate is None else given.rate
    warmup = min(preset.warmup_steps * batch / len(data), preset.epochs)
    kind = "step" if preset.milestones else "cosine"
    rates = hvd.Schedule(peak, preset.epochs, kind, warmup, peak * preset.warmup_start, preset.milestones)
    training.train_or_evaluate(batches, rates)
    training.close({**same, "classes": data.table["categories"], "image_size": preset.image_size})


if __name__ == "__main__":
    main()
