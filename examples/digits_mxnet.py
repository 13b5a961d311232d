"""Train a small conv net on real handwritten digits: `ringdance run -np 2 python examples/digits_mxnet.py`.

Also runs without a launcher. Data: scikit-learn's 1,797 digits of 8 x 8 pixels. MXNet 1.9 with Gluon.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

import ringdance.mxnet as hvd


def network() -> nn.HybridSequential:
    """Return a net of about 40,000 parameters: two convolutions and two dense layers."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"), nn.Conv2D(32, 3, padding=1, activation="relu"))
    net.add(nn.MaxPool2D(), nn.Dense(64, activation="relu"), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> None:
    """Train on this rank's share of the images, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    options = parser.parse_args()
    hvd.init()
    mx.random.seed(hvd.rank())
    digits = load_digits()
    images, labels = digits.images[:, None].astype("float32") / 16, digits.target
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])
    net = network()
    parameters = net.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)  # happens in the first pass, once shapes are known
    # A step has `size` times as many images, so scale the learning rate too.
    rate = {"learning_rate": 0.03 * hvd.size(), "momentum": 0.9}
    trainer = hvd.DistributedTrainer(parameters, "sgd", rate)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    start = time.perf_counter()
    for epoch in range(options.epochs):
        # All ranks shuffle in the same order and take equal shares. Leftover images at the end are dropped.
        shuffled = np.random.default_rng(epoch + 1).permutation(train)
        share = shuffled[: len(train) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
        for batch in np.array_split(share, range(options.batch, len(share), options.batch)):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[batch])), mx.nd.array(labels[batch]))
            loss.backward()
            trainer.step(len(batch))
        mean = hvd.allreduce(loss.mean()).asscalar()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.4f}", flush=True)
    speed = options.epochs * len(share) * hvd.size() / (time.perf_counter() - start)
    accuracy = (net(mx.nd.array(images[test])).asnumpy().argmax(1) == labels[test]).mean()
    weights = [parameter.data().asnumpy() for parameter in parameters.values()]
    hashes = hvd.allgather_object([hashlib.sha256(array).hexdigest() for array in weights])
    same = hashes.count(hashes[0]) == hvd.size()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {speed:,.0f} images/s; test accuracy: {accuracy:.2%}")
        print(f"all {hvd.size()} ranks hold the same weights: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
