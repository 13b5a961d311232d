"""Train a small conv net on real handwritten digits: `ringdance run -np 2 python examples/digits_flax.py`.

digits_jax.py does the same without Flax. Also runs without a launcher. Data: scikit-learn's 1,797 digits of
8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import ringdance.jax as hvd


def network(seed: int) -> nnx.Module:
    """Return a net of about 40,000 parameters: two convolutions and two dense layers."""
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.relu, nnx.Conv(16, 32, (3, 3), rngs=rngs), nnx.relu,
        lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)), lambda x: x.reshape(len(x), -1),
        nnx.Linear(512, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs),
    )  # fmt: skip


def main() -> None:
    """Train on this rank's share of the images, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()
    hvd.init()
    digits = load_digits()
    images, labels = digits.images[..., None].astype("float32") / 16, digits.target
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])
    model = network(hvd.rank())
    nnx.update(model, hvd.broadcast_parameters(nnx.state(model), root_rank=0))
    # A step has `size` times as many images, so scale the learning rate too.
    tx = hvd.distributed(optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.03 * hvd.size(), 0.9)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_of(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return hvd.allreduce(loss)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        # All ranks shuffle in the same order and take equal shares. Leftover images at the end are dropped.
        shuffled = np.random.default_rng(epoch + 1).permutation(train)
        share = shuffled[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in np.array_split(share, range(options.batch, len(share), options.batch)):
            loss = step(model, optimizer, images[batch], labels[batch])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}", flush=True)
    speed = options.epochs * len(share) * hvd.size() / (time.perf_counter() - start)
    accuracy = (model(images[test]).argmax(1) == labels[test]).mean()
    leaves = jax.tree.leaves(nnx.state(model))
    hashes = hvd.allgather_object([hashlib.sha256(np.asarray(array)).hexdigest() for array in leaves])
    same = hashes.count(hashes[0]) == hvd.size()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {speed:,.0f} images/s; test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
