"""Shared code of the scripts in this directory: handwritten digits, a small network, a weight fingerprint."""

import hashlib
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

TRAINING, TESTING = 1440, 354  # of 1,797 images; both are divisible by 1, 2 and 3 ranks


def digits(data_dir, train):
    """Return images (N, 1, 8, 8) as float32 with mean 0, and labels (N,). Cached as a file in `data_dir`."""
    path = os.path.join(data_dir, "digits.npz")
    if not os.path.exists(path):
        from sklearn.datasets import load_digits

        bunch = load_digits()
        order = np.random.default_rng(0).permutation(len(bunch.target))
        images = (bunch.images[order, None] / 8.0 - 1.0).astype(np.float32)
        os.makedirs(data_dir, exist_ok=True)
        unfinished = f"{path}.{os.getpid()}.npz"
        np.savez(unfinished, images=images, labels=bunch.target[order])
        os.replace(unfinished, path)
    with np.load(path) as arrays:
        part = slice(TRAINING) if train else slice(TRAINING, TRAINING + TESTING)
        images, labels = arrays["images"][part], arrays["labels"][part]
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


class Net(nn.Module):
    """One convolution and two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.around(x))


def resnet8(num_classes=10):
    """Return a residual network that is small enough for a few seconds on a CPU."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes),
    )


def fingerprint(model):
    """Return a short hash of the exact values of all parameters."""
    data = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]
