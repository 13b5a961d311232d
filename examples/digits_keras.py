"""Train a small conv net on real handwritten digits: `ringdance run -np 2 python examples/digits_keras.py`.

Uses the backend in KERAS_BACKEND: tensorflow, torch or jax. Also runs without a launcher, as
`python examples/digits_keras.py`. Data: scikit-learn's 1,797 digits of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringdance.keras as hvd


def network() -> keras.Model:
    """Return a net of about 40,000 parameters: two convolutions and two dense layers."""
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])


def main() -> None:
    """Train on this rank's share of the images, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()
    hvd.init()

    digits = load_digits()
    images, labels = digits.images[..., None].astype("float32") / 16, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    # Ranks take equal shares. Leftover images at the end are dropped.
    share = train[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]

    model = network()
    # A step has `size` times as many images, so scale the learning rate too.
    optimizer = keras.optimizers.SGD(0.03 * hvd.size(), momentum=0.9, global_clipnorm=5.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer), loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
    ]
    verbose = 2 if hvd.rank() == 0 else 0
    start = time.perf_counter()
    model.fit(
        images[share], labels[share], options.batch, options.epochs, verbose=verbose, callbacks=callbacks
    )
    seconds = time.perf_counter() - start

    _, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    bits = b"".join(array.tobytes() for array in model.get_weights())
    hashes = hvd.allgather_object(hashlib.sha256(bits).hexdigest())
    if hvd.rank() == 0:
        speed = options.epochs * len(share) * hvd.size() / seconds
        print(f"{hvd.size()} ranks on {keras.backend.backend()}: {speed:,.0f} images/s")
        print(f"test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if len(set(hashes)) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
