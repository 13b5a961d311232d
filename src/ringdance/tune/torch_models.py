"""PyTorch's models of ``ringdance bench train``: written out where no package that all have brings them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FIELDS, TABLE, WORDS = 39, 100_000, 30_522


def recipe(name: str) -> Any:
    """Import the script train_torch.py of a recipe, as it is: with the files beside it."""
    package = importlib.import_module(f"ringdance.recipes.{name}")
    sys.path.insert(0, str(Path(str(package.__file__)).parent))
    return importlib.import_module("train_torch")


def mlp() -> nn.Module:
    """Return the 784-512-512-10 perceptron: 0.67 M parameters."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def convnet(size: int) -> nn.Module:
    """Return three convolutions and two dense layers: 8.5 M parameters for images of 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


def vgg16() -> nn.Module:
    """Return VGG-16 (Simonyan and Zisserman, 2014, configuration D)."""
    layers: list[nn.Module] = []
    channels = 3
    for stage, count in enumerate((2, 2, 3, 3, 3)):
        for _ in range(count):
            width = min(64 << stage, 512)
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for before, after in ((25_088, 4096), (4096, 4096)):
        layers += [nn.Linear(before, after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class Branches(nn.Module):
    """Branches beside each other, whose channels come one after the other.

    Args:
        channels: of what comes in.
        branches: each a list of layers: (channels, kernel, stride, padding) of a convolution, "max" or "mean"
            for a pool, a list of branches.
    """

    def __init__(self, channels: int, branches: list[list[Any]]) -> None:
        super().__init__()
        self.branches, self.channels = nn.ModuleList(), 0
        for branch in branches:
            layers, width = nn.Sequential(), channels
            for one in branch:
                layer = {"max": nn.MaxPool2d(3, 2), "mean": nn.AvgPool2d(3, 1, 1)}.get(str(one))
                if layer is None:
                    made = Branches(width, one) if isinstance(one, list) else Convolution(width, *one)
                    layer, width = made, made.channels
                layers.append(layer)
            self.branches.append(layers)
            self.channels += width

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same images."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Convolution(nn.Sequential):
    """A convolution with normalization; it keeps the size, but for strides and where `same` is false."""

    def __init__(self, before: int, channels: int, kernel: Any, stride: int = 1, same: bool = True) -> None:
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = [side // 2 if same and stride == 1 else 0 for side in sides]
        layer = nn.Conv2d(before, channels, sides, stride, (padding[0], padding[1]), bias=False)
        super().__init__(layer, nn.BatchNorm2d(channels, eps=0.001), nn.ReLU(inplace=True))
        self.channels = channels


def inception_v3() -> nn.Module:
    """Return Inception-v3 (Szegedy et al., 2015) without the auxiliary head."""
    row, column = (1, 7), (7, 1)
    pair: list[Any] = [[(384, (1, 3))], [(384, (3, 1))]]
    blocks: list[Any] = [
        [[(32, 3, 2), (32, 3, 1, False), (64, 3), "max", (80, 1), (192, 3, 1, False), "max"]],
        *(
            [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], ["mean", (pool, 1)]]
            for pool in (32, 64, 64)
        ),
        [[(384, 3, 2)], [(64, 1), (96, 3), (96, 3, 2)], ["max"]],
        *(
            [
                [(192, 1)], [(n, 1), (n, row), (192, column)],
                [(n, 1), (n, column), (n, row), (n, column), (192, row)], ["mean", (192, 1)],
            ]
            for n in (128, 160, 160, 192)
        ),
        [[(192, 1), (320, 3, 2)], [(192, 1), (192, row), (192, column), (192, 3, 2)], ["max"]],
        *([[(320, 1)], [(384, 1), pair], [(448, 1), (384, 3), pair], ["mean", (192, 1)]] for _ in range(2)),
    ]  # fmt: skip
    layers, channels = nn.Sequential(), 3
    for block in blocks:
        layers.append(made := Branches(channels, block))
        channels = made.channels
    return layers.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)])


class DeepFM(nn.Module):
    """The recipe's layers behind a table of 100,000 rows, whose gradient is sparse; one logit a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, 17, sparse=True)
        self.layers = recipe("deepfm").Layers(FIELDS, 16, [400, 400, 400])

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (n, 1), of ids, shape (n, fields)."""
        unique, where = torch.unique(ids, return_inverse=True)
        return self.layers(self.table(unique), where, torch.ones(ids.shape, device=ids.device))[:, None]


class Bert(nn.Module):
    """BERT-base (Devlin et al., 2018) for classification, without dropout: 109 M parameters."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 768), nn.Parameter(torch.zeros(length, 768))
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
        self.norm, self.encoder = nn.LayerNorm(768), nn.TransformerEncoder(layer, 12)
        self.pool, self.head = nn.Linear(768, 768), nn.Linear(768, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (n, 2), of words, shape (n, length)."""
        features = self.encoder(self.norm(self.words(ids) + self.places))
        return self.head(torch.tanh(self.pool(features[:, 0])))


def build(name: str, size: int) -> nn.Module:
    """Return a model; `size` is that of an image in pixels, or the length of a text."""
    if name == "resnet50":
        return recipe("resnet50").resnet50(1000, 64)
    makes: dict[str, Any] = {"mlp": mlp, "vgg16": vgg16, "inception_v3": inception_v3, "deepfm": DeepFM}
    return makes[name]() if name in makes else {"convnet": convnet, "bert-base": Bert}[name](size)
