"""Train a small conv net on real handwritten digits: `ringdance run -np 2 python examples/digits_jax.py`.

Also runs without a launcher. Data: scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ringdance.jax as hvd


def network(key: jax.Array) -> list[jax.Array]:
    """Return the weights of two convolutions and two dense layers without biases: about 40,000 parameters."""
    make = jax.nn.initializers.he_normal()
    return [make(key, shape) for shape in ((3, 3, 1, 16), (3, 3, 16, 32), (512, 64), (64, 10))]


def logits(weights: list[jax.Array], images: jax.Array) -> jax.Array:
    """Return the scores of the ten classes."""
    x, layout = images, ("NHWC", "HWIO", "NHWC")
    for kernel in weights[:2]:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jax.nn.relu(x.reshape(len(x), -1) @ weights[2]) @ weights[3]


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
    weights = hvd.broadcast_parameters(network(jax.random.key(hvd.rank())), root_rank=0)
    # A step has `size` times as many images, so scale the learning rate too.
    tx = hvd.distributed(optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(0.03 * hvd.size(), 0.9)))
    state = tx.init(weights)

    def loss_of(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(weights, x), y).mean()

    @jax.jit
    def step(weights: list[jax.Array], state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        updates, state = tx.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, hvd.allreduce(loss)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        # All ranks shuffle in the same order and take equal shares. Leftover images at the end are dropped.
        shuffled = np.random.default_rng(epoch + 1).permutation(train)
        share = shuffled[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in np.array_split(share, range(options.batch, len(share), options.batch)):
            weights, state, loss = step(weights, state, images[batch], labels[batch])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}", flush=True)
    speed = options.epochs * len(share) * hvd.size() / (time.perf_counter() - start)
    accuracy = (logits(weights, images[test]).argmax(1) == labels[test]).mean()
    hashes = hvd.allgather_object([hashlib.sha256(np.asarray(array)).hexdigest() for array in weights])
    same = hashes.count(hashes[0]) == hvd.size()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {speed:,.0f} images/s; test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
