"""PyTorch models for ``ringdance bench train`` that common packages do not provide."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FIELDS, TABLE, WORDS = 39, 100_000, 30_522


def recipe(name: str) -> Any:
    """Import train_torch.py from a recipe. Also makes the recipe's other files importable."""
    package = importlib.import_module(f"ringdance.recipes.{name}")
    sys.path.insert(0, str(Path(str(package.__file__)).parent))
    return importlib.import_module("train_torch")


def mlp() -> nn.Module:
    """Build a multilayer perceptron with layer sizes 784-512-512-10 (0.67 M parameters)."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def convnet(size: int) -> nn.Module:
    """Build a network with three convolutions and two dense layers (8.5 M parameters for 32-pixel images)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


def vgg16() -> nn.Module:
    """Build VGG-16 (Simonyan and Zisserman, 2014, configuration D)."""
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


class DeepFM(nn.Module):
    """The DeepFM recipe's layers on top of an embedding table with 100,000 rows and sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, 17, sparse=True)
        self.layers = recipe("deepfm").Layers(FIELDS, 16, [400, 400, 400])

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (n, 1), for ids, shape (n, fields)."""
        unique, where = torch.unique(ids, return_inverse=True)
        return self.layers(self.table(unique), where, torch.ones(ids.shape, device=ids.device))[:, None]


class Bert(nn.Module):
    """BERT-base (Devlin et al., 2018) for classification, without dropout. Has 109 M parameters."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 768), nn.Parameter(torch.zeros(length, 768))
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
        self.norm, self.encoder = nn.LayerNorm(768), nn.TransformerEncoder(layer, 12)
        self.pool, self.head = nn.Linear(768, 768), nn.Linear(768, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (n, 2), for token ids, shape (n, length)."""
        features = self.encoder(self.norm(self.words(ids) + self.places))
        return self.head(torch.tanh(self.pool(features[:, 0])))


def build(name: str, size: int) -> nn.Module:
    """Build the model ``name``. ``size`` is the image size in pixels, or the sequence length."""
    if name == "resnet50":
        return recipe("resnet50").resnet50(1000, 64)
    makes: dict[str, Any] = {"mlp": mlp, "vgg16": vgg16, "deepfm": DeepFM}
    return makes[name]() if name in makes else {"convnet": convnet, "bert-base": Bert}[name](size)
