"""Train ResNet-50 with PyTorch on any number of processes: ImageNet, your own images, or synthetic ones.

Try it on a laptop without data first, then on data written by `ringdance data prepare`:

    ringdance run -np 2 python train_torch.py --preset laptop --synthetic --steps 20
    ringdance data prepare imagenet /data/ILSVRC2012 /data/imagenet --format tfrecord --shards 128
    ringdance run -np 8 python train_torch.py --preset 8xV100 --data /data/imagenet --checkpoints run1
    ringdance run -H node1:8,node2:8,node3:8,node4:8 python train_torch.py --preset 32 --data /data/imagenet

`presets.py` contains the presets, which are hyperparameters of published runs with their results. Options
override individual values. A preset's learning rate applies to its global batch. With a different number of
processes, the rate is scaled in proportion to the batch.

By default, the script trains the ResNet-50 below, whose parameters have the same names as torchvision's
resnet50. With --model NAME, it trains any torchvision classifier (if torchvision is installed), such as
resnet18 or vit_b_16, with the normalization that its weights expect. googlenet and inception_v3 are built
without their auxiliary heads. --weights FILE takes a model's state_dict(), written by torch.save().

If there are GPUs, each rank uses the GPU whose number is its local rank.

With --checkpoints, the same command resumes a run that was stopped or killed, even with a different number of
processes. Model, optimizer, epoch and the position in the epoch are read from the newest checkpoint, and no
image is used twice in an epoch. Only rank 0 reads and writes the directory.

Every --log-every steps, rank 0 prints the mean loss and top-1 accuracy over the (augmented) images used for
training since the previous line, the images per second in total and per rank, the share of time that training
waited for images, the elapsed time including earlier runs, and the time left. With --price-per-hour, the
price of all machines together, it also prints the cost so far.

After every --evaluate-every epochs, rank 0 prints top-1 and top-5 accuracy on the split `validation`. Each
image is counted once. If this split does not exist, the training images are evaluated instead, and the output
says so. The model with the best top-1 accuracy on `validation` is kept in the --checkpoints directory.
--evaluate prints its metrics again, and --export writes it for score.py.

Images at the end of an epoch that do not fill a global batch are skipped. Each epoch skips different images.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import shared  # type: ignore[import-not-found]  # in this directory
import torch
from presets import PRESETS, Preset  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional

import ringdance.torch as hvd
from ringdance.data import Batch
from ringdance.recipes import torch_state

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # statistics of ImageNet's RGB values
Array = np.ndarray[Any, Any]


# Model ----------------------------------------------------------------------------------------------------


def conv(before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution whose padding keeps the image size, except for the stride."""
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    """A bottleneck block of 1x1, 3x3 (with the stride, as in v1.5) and 1x1 convolutions, and a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        nn.init.zeros_(self.bn3.weight)  # each block starts as the identity (Goyal et al. 2017)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            shortcut = conv(channels, 4 * width, 1, stride)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, 4 * width, height / stride, width / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = functional.relu(self.bn2(self.conv2(y)), inplace=True)
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


def resnet50(classes: int, width: int) -> nn.Module:
    """Build ResNet-50 v1.5, which returns logits. Its parameters have the same names as in torchvision."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv(3, width, 7, 2), bn1=nn.BatchNorm2d(width))
    layers |= OrderedDict(relu=nn.ReLU(inplace=True), maxpool=nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate((3, 4, 6, 3)):
        blocks: list[nn.Module] = []
        for number in range(count):
            blocks.append(Block(channels, width << stage, 2 if stage and not number else 1))
            channels = 4 * (width << stage)
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    head = nn.Linear(channels, classes)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    layers |= OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=head)
    model = nn.Sequential(layers)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def of_torchvision(name: str, classes: int, size: int) -> tuple[nn.Module, Any, Any]:
    """Build a torchvision classifier. Also returns the pixel mean and standard deviation that it expects."""
    try:
        from torchvision import models  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"--model {name} needs a torchvision built for this torch: {error}") from None
    names = models.list_models(module=models)
    if name not in names:
        raise SystemExit(f"--model {name} is not a torchvision classifier. Use one of {', '.join(names)}.")
    special: dict[str, Any] = {"image_size": size} if name.startswith("vit") else {}
    if name in ("googlenet", "inception_v3"):
        special = {"aux_logits": False, "init_weights": True, "transform_input": True}
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **special)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise SystemExit(f"--model {name} does not take images of {size} pixels: {error}") from None
    transforms = models.get_model_weights(name).DEFAULT.transforms()
    return model.train(), [255 * mean for mean in transforms.mean], [255 * std for std in transforms.std]


class Classifier(nn.Module):
    """The exported model, which converts pixels to probabilities."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities of shape (n, classes) for uint8 images of shape (n, size, size, 3)."""
        pixels = (images.permute(0, 3, 1, 2).float() - self.mean) / self.deviation
        logits: Tensor = self.model(pixels)
        return logits.softmax(1)


# Optimizer ------------------------------------------------------------------------------------------------


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: weights with decay, then biases and normalization layers without decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in trained if weight.ndim <= 1], "weight_decay": 0.0},
    ]


class LARS(torch.optim.Optimizer):
    """Momentum SGD that adapts the learning rate of each layer to the norms of its weights and gradients.

    For each parameter with more than one dimension::

        trust = 0.001 * |w| / (|g| + weight_decay * |w|)    1 if a norm is 0
        v = momentum * v + lr * trust * (g + weight_decay * w)
        w = w - v

    Biases and the scales and offsets of normalization layers have one dimension. For these, the trust is 1
    and weight decay is not applied.
    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, without synchronizing with the GPU."""
        for group in self.param_groups:
            decay = group["weight_decay"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state, rate = self.state[parameter], group["lr"]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                if parameter.ndim > 1:
                    weight, slope = parameter.norm(dtype=torch.float32), gradient.norm(dtype=torch.float32)
                    trust = 0.001 * weight / (slope + decay * weight)
                    trust = torch.where((weight > 0) & (slope > 0), trust, 1.0)
                    rate, gradient = rate * trust.to(parameter.dtype), gradient + decay * parameter
                parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(rate * gradient))


# Training -------------------------------------------------------------------------------------------------


class TorchImageModel:
    """This rank's model, optimizer and loss scaler. See Note [Models of recipes]."""

    framework, described = "torch", staticmethod(shared.described)

    def __init__(
        self, given: argparse.Namespace, preset: Preset, classes: int, device: torch.device,
        checks: Any = None,
    ) -> None:
        self.device, self.preset, self.passes, self.classes = device, preset, given.accumulate, classes
        self.checks = checks
        model: Any
        if given.model:
            model, mean, deviation = of_torchvision(given.model, classes, preset.image_size)
        else:
            model, mean, deviation = resnet50(classes, given.width), MEAN, DEVIATION
        self.model: nn.Module = model.to(device, memory_format=torch.channels_last)
        self.mean = torch.tensor(mean, device=device).view(3, 1, 1)
        self.deviation = torch.tensor(deviation, device=device).view(3, 1, 1)
        groups = parameter_groups(self.model, preset.weight_decay)
        if preset.optimizer == "lars":
            self.inner: torch.optim.Optimizer = LARS(groups, preset.momentum)
        else:
            self.inner = torch.optim.SGD(groups, 0.0, preset.momentum)
        self.optimizer = hvd.DistributedOptimizer(
            self.inner, self.model.named_parameters(), backward_passes_per_step=self.passes
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=preset.precision == "float16")
        self.sums = torch.zeros(3, device=device)  # total loss, correct images, all images

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits for images of shape (n, 3, size, size), with pixel values from 0 to 255."""
        with torch_state.autocast(self.device, self.preset.precision):
            logits: Tensor = self.model((images.float() - self.mean) / self.deviation)
        return logits

    def step(self, batch: Batch, rate: float) -> None:
        """Update the model with one batch, which is processed in one or more passes.

        Each rank's loss is scaled by ``batch.weight``, so averaging the gradients over the ranks gives the
        mean over all images in the global batch, even if the batch is short or this rank has no images.
        """
        for group in self.inner.param_groups:
            group["lr"] = rate
        count = len(batch.labels)
        passes = min(self.passes, count)
        self.optimizer.set_backward_passes_per_step(passes)
        parts = (array.tensor_split(passes) for array in (batch.images, batch.labels))
        for images, labels in zip(*parts, strict=True):
            logits, smoothing = self.forward(images).float(), self.preset.label_smoothing
            loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
            right = (logits.detach().argmax(1) == labels).sum()
            self.sums += torch.stack([loss.detach() * len(labels), right, right.new_tensor(len(labels))])
            scaled: Any = self.scaler.scale(loss * (batch.weight * len(labels) / count))
            scaled.backward()
        self.scaler.step(self.optimizer)  # in float16, all ranks skip the step if a gradient overflows
        self.scaler.update()
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, float]:
        """Return this rank's mean loss and top-1 accuracy since the last call. Synchronizes with the GPU."""
        loss, right, count = self.sums.tolist()
        self.sums.zero_()
        return {"loss": loss / count, "top-1": right / count}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the number of images on all ranks ("count"), and top-1 and top-5 accuracy from 0 to 1."""
        self.average_statistics()
        model, metric = self.model.eval(), hvd.TopK(shared.ranks_of(self.classes))
        self.checks.set_epoch(0)
        for batch in self.checks:
            if batch.weight:  # a batch of weight 0 is padding
                metric.add(self.forward(batch.images).float().cpu(), batch.labels.cpu())
        model.train()
        return metric.result()

    def average_statistics(self) -> None:
        """Average running means and variances over the ranks, which compute them from their own images."""
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if statistics:
            hvd.grouped_allreduce_(statistics, name="statistics")

    def state(self) -> dict[str, Array]:
        """Return copies of the arrays for a checkpoint: model, optimizer and loss scaler."""
        return torch_state.arrays_of(self.inner, self.scaler, model=self.model)

    def restore(self, state: dict[str, Array]) -> None:
        """Restore a state returned by ``state``."""
        torch_state.restore(state, self.inner, self.scaler, model=self.model)

    def load_weights(self, file: str) -> list[str]:
        """Load a state dict, but skip a head of another shape. Returns the names of skipped parameters."""
        head = [*self.model.state_dict()][-1].rpartition(".")[0] + "."
        return torch_state.load_weights(self.model, file, lambda name: name.startswith(head))

    def equal(self) -> None:
        """Broadcast rank 0's model to all other ranks."""
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def export(self, directory: Path) -> None:
        """Write weights.pt, which --weights can load, and program.pt2 for score.py."""
        trained: Any = self.model
        model = trained.to("cpu", memory_format=torch.contiguous_format).eval()
        torch.save(model.state_dict(), directory / "weights.pt")
        size = self.preset.image_size
        example = torch.zeros(2, size, size, 3, dtype=torch.uint8)
        whole = Classifier(model, self.mean.cpu(), self.deviation.cpu()).eval()
        program = torch.export.export(whole, (example,), dynamic_shapes=({0: torch.export.Dim("n")},))
        torch.export.save(program, directory / "program.pt2")


def main() -> None:
    """Run the training script."""
    options = shared.parser(__doc__ or "")
    given = shared.read(options)
    if not given.model and given.image_size is not None and given.image_size <= 32:
        options.error(f"--image-size {given.image_size} is too small for five halvings. Use 33 or more.")
    hvd.init()
    preset = PRESETS[given.preset].overridden(given)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # all images have the same size
    torch.manual_seed(given.seed)
    data, check, split = shared.datasets(given)
    loader, checks = shared.loaders(given, preset, hvd.image_loader, data, check, device=device)
    model = TorchImageModel(given, preset, len(data.classes), device, checks)
    shared.train(given, preset, model, data, loader, split, f"PyTorch on {device.type}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
