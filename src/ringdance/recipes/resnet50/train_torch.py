"""Train ResNet-50 with PyTorch on any number of processes: ImageNet, your own images, or synthetic ones.

Try it on a laptop, without data; then with data, as `ringdance data prepare` writes it:

    ringdance run -np 2 python train_torch.py --preset laptop --synthetic --steps 20
    ringdance data prepare imagenet /data/ILSVRC2012 /data/imagenet --format tfrecord --shards 128
    ringdance run -np 8 python train_torch.py --preset 8xV100 --data /data/imagenet --checkpoints run1
    ringdance run -H node1:8,node2:8,node3:8,node4:8 python train_torch.py --preset 32 --data /data/imagenet

`ringdance recipes show resnet50` lists the presets: the hyper-parameters of published runs and their
results. Options override single values. The learning rate of a preset holds for its whole batch; with
another number of processes it is scaled with the batch.

A rank uses the GPU of its local rank, where there are GPUs.

With --checkpoints a run that was stopped, even killed, goes on with the same command, also on another
number of processes: model, optimizer, epoch and position in the epoch are read from the newest checkpoint,
and no image is used twice in an epoch. Only rank 0 reads and writes that directory.

What is printed, by rank 0: one line every --log-every steps with the loss, images per second of all ranks and
of each, the share of the time in which training waited for images, the time so far with that of the runs
before, the time left, and what it has cost, if --price-per-hour says what all machines together cost. After
every --evaluate-every epochs: top-1 and top-5 on the split `validation`, each image counted once; if the data
has none, on the images that were trained on, which the line says.

The last images of an epoch that are fewer than a whole batch are left out: others in each epoch.
"""

from __future__ import annotations

import argparse
import io
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import parser, read, schedule_of  # type: ignore[import-not-found]  # beside this file
from presets import PRESETS, Preset  # type: ignore[import-not-found]  # beside this file
from torch import Tensor, nn
from torch.nn import functional

import ringdance.torch as hvd
from ringdance.data import Batch, Dataset, Synthetic
from ringdance.recipes.log import TRAINED_ON, ImageLog

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's pixels, R, G, B


# Model ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the stride is in the 3x3 convolution (v1.5)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()

        def conv(before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
            padding = kernel // 2
            return [nn.Conv2d(before, after, kernel, stride, padding, bias=False), nn.BatchNorm2d(after)]

        self.body = nn.Sequential(
            *conv(channels, width, 1), nn.ReLU(inplace=True), *conv(width, width, 3, stride),
            nn.ReLU(inplace=True), *conv(width, 4 * width, 1),
        )
        # A block begins as the identity: Goyal et al. 2017.
        nn.init.zeros_(self.body[-1].get_parameter("weight"))
        changed = stride > 1 or channels != 4 * width
        self.shortcut = nn.Sequential(*conv(channels, 4 * width, 1, stride)) if changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, 4 * width, height / stride, width / stride)."""
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(classes: int, width: int) -> nn.Module:
    """Return ResNet-50 v1.5; logits."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            layers.append(Block(channels, width << stage, 2 if stage and not number else 1))
            channels = 4 * (width << stage)
    head = nn.Linear(channels, classes)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for one in model.modules():
        if isinstance(one, nn.Conv2d):
            nn.init.kaiming_normal_(one.weight, mode="fan_out", nonlinearity="relu")
    return model


# Training -------------------------------------------------------------------------------------------------


@dataclass
class Position:
    """Where a training is: steps, epoch, images of it that are done, seconds so far."""

    step: int = 0
    epoch: int = 0
    done: int = 0
    seconds: float = 0.0


class Training:
    """Model, optimizer and loss scale of this rank, and how they are updated and saved."""

    def __init__(self, given: argparse.Namespace, preset: Preset, classes: int, device: torch.device) -> None:
        self.device, self.preset, self.passes = device, preset, given.accumulate
        model: Any = resnet50(classes, given.width)
        self.model: nn.Module = model.to(device, memory_format=torch.channels_last)
        self.mean = torch.tensor(MEAN, device=device).view(3, 1, 1)
        self.deviation = torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        groups = hvd.parameter_groups(self.model, preset.weight_decay)  # norms and biases do not decay
        if preset.optimizer == "lars":
            self.inner: torch.optim.Optimizer = hvd.LARS(groups, 0.0, preset.momentum)
        else:
            self.inner = torch.optim.SGD(groups, 0.0, preset.momentum)
        self.optimizer = hvd.DistributedOptimizer(
            self.inner, self.model.named_parameters(), backward_passes_per_step=self.passes
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=preset.precision == "float16")
        self.checkpoints = hvd.Checkpoints(given.checkpoints, given.keep) if given.checkpoints else None

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images, uint8, shape (n, 3, size, size)."""
        with self.autocast():
            logits: Tensor = self.model((images.float() - self.mean) / self.deviation)
        return logits

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which convolutions compute with 16 bits, if the preset says so."""
        low = self.preset.precision != "float32"
        dtype = torch.float16 if self.preset.precision == "float16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=low)

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Update the model by one batch, in so many passes; return the mean loss over this rank's images.

        The gradients are averaged over the ranks. The weight of the batch makes that the mean over the images
        of the global batch, also if it is short, or if this rank has none of it.
        """
        for group in self.inner.param_groups:
            group["lr"] = rate
        total, count = torch.zeros((), device=self.device), len(batch.labels)
        passes = min(self.passes, count)
        self.optimizer.set_backward_passes_per_step(passes)
        parts = batch.images.tensor_split(passes), batch.labels.tensor_split(passes)
        for images, labels in zip(*parts, strict=True):
            loss = functional.cross_entropy(
                self.forward(images).float(), labels, label_smoothing=self.preset.label_smoothing
            ) * (len(labels) / count)
            total += loss.detach()
            scaled: Any = self.scaler.scale(loss * batch.weight)
            scaled.backward()
        self.scaler.step(self.optimizer)  # float16: if a rank's gradients overflow, all skip this step
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the number of images of all ranks, "count", and the shares "top1" and "top5"."""
        self.average_statistics()
        metric = hvd.TopK((1, 5))
        self.model.eval()
        loader.set_epoch(0)
        for batch in loader:
            if batch.weight:  # else padding
                metric.add(self.forward(batch.images).float().cpu(), batch.labels.cpu())
        self.model.train()
        return metric.result()

    def average_statistics(self) -> None:
        """Average normalization's running means and variances, which each rank has of its own images."""
        statistics = [one for one in self.model.buffers() if one.is_floating_point()]
        hvd.grouped_allreduce_(statistics, name="statistics")

    def save(self, position: Position) -> None:
        """Begin to write a checkpoint: a copy is made here, the file is written in the background."""
        if self.checkpoints is None:
            return
        self.average_statistics()
        state = {}
        if hvd.rank() == 0:
            state = hvd.snapshot({**self._parts(), "position": vars(position)})
        self.checkpoints.save(position.step, lambda path: torch.save(state, path))

    def restore(self) -> Position:
        """Load the newest checkpoint on all ranks; without one, make them equal."""
        found = self.checkpoints.read() if self.checkpoints else None
        if found is None:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            return Position()
        saved = torch.load(io.BytesIO(found[1]), map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.inner.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        return Position(**saved["position"])

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.inner, "scaler": self.scaler}
        return {name: one.state_dict() for name, one in parts.items()}


def train(
    given: argparse.Namespace, training: Training, data: Any, loader: Any, check: Any, split: str
) -> None:
    """Train from the newest checkpoint to the last epoch; ``split``: what ``check`` is of."""
    preset = training.preset
    schedule = schedule_of(preset, given, len(data), loader.plan.batch_size * hvd.size())
    at = training.restore()
    log = ImageLog(given, len(data), preset.epochs, at.seconds)
    log.begin(at.step, at.epoch, at.done)
    last = at.step + given.steps if given.steps else None
    while at.epoch < preset.epochs and at.step != last:
        loader.set_epoch(at.epoch, at.done)
        end = loader.plan.end
        for batch in log.timed(loader):
            rate = schedule(at.epoch + at.done / len(data))
            loss = training.step(batch, rate)
            at.step, at.done = at.step + 1, batch.position
            log.use(at.step, at.epoch, batch)
            if at.step % given.log_every == 0 or at.done == end:
                log.line(at.step, at.epoch * len(data) + at.done, rate, float(loss))  # waits for the GPU
            if at.step == last or (at.step % given.checkpoint_every == 0 and at.done < end):
                at.seconds = log.seconds()
                training.save(at)
            if at.step == last:
                break
        if at.done == end:
            at.epoch, at.done, at.seconds = at.epoch + 1, 0, log.seconds()
            training.save(at)
        over = at.epoch >= preset.epochs
        if given.evaluate_every and (over or (at.done == 0 and at.epoch % given.evaluate_every == 0)):
            log.evaluation(at.step, at.epoch, training.evaluate(check), split)
    if training.checkpoints:
        training.checkpoints.close()
    log.close()


def main() -> None:
    """Train as the command line says."""
    options = parser(__doc__ or "")
    options.add_argument("--width", type=int, default=64, help="channels of the first stage; default: 64")
    options.add_argument(
        "--threads", type=int, metavar="N", help="that decode images; default: the cores of each rank"
    )
    given = read(options)
    if given.image_size is not None and given.image_size <= 32:
        size = given.image_size
        options.error(f"--image-size {size}: give 33 or more: the network halves it five times")
    hvd.init()
    preset = PRESETS[given.preset].overridden(given)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(given.seed)
    data: Any = Synthetic(given.synthetic_images) if given.synthetic else Dataset.open(given.data, "train")
    found = given.data and (Path(given.data) / "validation.json").exists()
    check = Dataset.open(given.data, "validation") if found else data
    split = "validation" if found else TRAINED_ON
    sizes = {"image_size": preset.image_size, "device": device, "threads": given.threads, "seed": given.seed}
    per_rank = preset.batch_size * given.accumulate
    loader = hvd.image_loader(data, per_rank, augment=preset.augment, shuffle=True, drop_last=True, **sizes)
    checks = hvd.image_loader(check, preset.batch_size, augment=False, **sizes)
    training = Training(given, preset, len(data.classes), device)
    if hvd.rank() == 0:
        batch = per_rank * hvd.size()
        print(
            f"ResNet-50 on {device.type}: {hvd.size()} ranks, batch {batch:,}, {preset.optimizer}, "
            f"{preset.precision}, {len(data):,} images of {len(data.classes)} classes, "
            f"{preset.epochs:g} epochs\n"
            f"preset {given.preset} ({preset.source}): {preset.expected}", flush=True,
        )  # fmt: skip
    train(given, training, data, loader, checks, split)
    hvd.shutdown()


if __name__ == "__main__":
    main()
