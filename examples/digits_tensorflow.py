"""Train a small conv net on handwritten digits: `ringdance run -np 2 python examples/digits_tensorflow.py`.

Also runs without a launcher. Uses a training loop with a gradient tape. digits_keras.py uses Keras's fit().
"""

from __future__ import annotations

import argparse
import hashlib
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringdance.tensorflow as hvd


def network() -> keras.Model:
    """Return a net of about 40,000 parameters: two convolutions and two dense layers."""
    return keras.Sequential([
        keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"), keras.layers.MaxPool2D(),
        keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10),
    ])


def main() -> None:
    """Train on this rank's share of the images, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()

    hvd.init()
    digits = load_digits()
    images, labels = digits.images[..., None].astype("float32") / 16, digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:360], order[360:]

    model = network()
    hvd.broadcast_variables(model.variables, root_rank=0)
    # A step has `size` times as many images, so scale the learning rate too.
    optimizer = keras.optimizers.SGD(0.03 * hvd.size(), momentum=0.9)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores))
        tape = hvd.DistributedGradientTape(tape)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 5.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        # All ranks shuffle in the same order and take equal shares. Leftover images at the end are dropped.
        shuffled = train[np.random.default_rng(epoch + 1).permutation(len(train))]
        share = shuffled[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in np.array_split(share, range(options.batch, len(share), options.batch)):
            loss = step(tf.constant(images[batch]), tf.constant(labels[batch]))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}", flush=True)
    speed = options.epochs * len(share) * hvd.size() / (time.perf_counter() - start)

    accuracy = (model.predict(images[test], verbose=0).argmax(1) == labels[test]).mean()
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    hashes = hvd.allgather_object(hashlib.sha256(weights).hexdigest())
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {speed:,.0f} images/s")
        print(f"test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if len(set(hashes)) == 1 else 'NO'}")


if __name__ == "__main__":
    main()
