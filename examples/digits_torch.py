"""Train a small conv net on real handwritten digits: `ringdance run -np 2 python examples/digits_torch.py`.

Also runs without a launcher, as `python examples/digits_torch.py`. Data: scikit-learn's 1,797 digits of
8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import ringdance.torch as hvd


def network() -> nn.Module:
    """Return a net of about 40,000 parameters: two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def main() -> None:
    """Train on this rank's share of the images, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate for the batch of a single rank")
    options = parser.parse_args()
    hvd.init()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]

    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # A step has `size` times as many images, so scale the learning rate too.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    seen, start = 0, time.perf_counter()
    for epoch in range(options.epochs):
        # All ranks shuffle in the same order and take equal shares. Leftover images at the end are dropped.
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch + 1))]
        share = shuffled[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in share.split(options.batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            seen += len(batch)
        loss = hvd.allreduce(loss.detach())
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}", flush=True)
    seconds = time.perf_counter() - start

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    hashes = hvd.allgather_object(hashlib.sha256(weights).hexdigest())
    if hvd.rank() == 0:
        speed = seen / seconds
        print(f"{hvd.size()} ranks: {speed * hvd.size():,.0f} images/s, {speed:,.0f} images/s per rank")
        print(f"test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if len(set(hashes)) == 1 else 'NO'}")
    if len(set(hashes)) != 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
