"""MXNet's MNIST example as users write it for Horovod: Gluon, a trainer, evaluation, a file by rank 0."""

import argparse
import logging
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from sklearn.datasets import load_digits

import horovod.mxnet as hvd

parser = argparse.ArgumentParser(description="MXNet MNIST Distributed Example")
parser.add_argument("--batch-size", type=int, default=32, help="training batch size")
parser.add_argument("--dtype", type=str, default="float32")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--save", default="mnist.params")
args = parser.parse_args()

if not args.no_cuda and mx.context.num_gpus() == 0:
    args.no_cuda = True
logging.basicConfig(level=logging.INFO)

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin context to local rank.
context = mx.cpu(hvd.local_rank()) if args.no_cuda else mx.gpu(hvd.local_rank())
num_workers = hvd.size()
mx.random.seed(42 + hvd.rank())


def get_mnist_iterator(rank):
    digits = load_digits()
    images = digits.images[:1792, None].astype("float32") / 16
    labels = digits.target[:1792].astype("float32")
    own = slice(rank, None, num_workers)
    train = mx.io.NDArrayIter(images[own], labels[own], args.batch_size, last_batch_handle="discard")
    return train, mx.io.NDArrayIter(images, labels, args.batch_size, last_batch_handle="discard")


def conv_nets():
    net = gluon.nn.HybridSequential(prefix="mnist_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(channels=8, kernel_size=3, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        net.add(gluon.nn.Flatten())
        net.add(gluon.nn.Dense(32, activation="relu"))
        net.add(gluon.nn.Dense(10))
    return net


def evaluate(model, data_iter, context):
    data_iter.reset()
    metric = mx.metric.Accuracy()
    for batch in data_iter:
        data = batch.data[0].as_in_context(context)
        label = batch.label[0].as_in_context(context)
        metric.update([label], [model(data.astype(args.dtype, copy=False))])
    return metric.get()


train_data, val_data = get_mnist_iterator(hvd.rank())
model = conv_nets()
model.cast(args.dtype)
model.hybridize()

# Horovod: adjust learning rate based on number of workers.
optimizer_params = {"momentum": args.momentum, "learning_rate": args.lr * hvd.size()}
opt = mx.optimizer.create("sgd", **optimizer_params)

initializer = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
model.initialize(initializer, ctx=context)

# Horovod: fetch and broadcast parameters.
params = model.collect_params()
if params is not None:
    hvd.broadcast_parameters(params, root_rank=0)

# Horovod: create DistributedTrainer, a subclass of gluon.Trainer.
trainer = hvd.DistributedTrainer(params, opt)

loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
metric = mx.metric.Accuracy()

for epoch in range(args.epochs):
    tic = time.time()
    train_data.reset()
    metric.reset()
    for nbatch, batch in enumerate(train_data, start=1):
        data = batch.data[0].as_in_context(context)
        label = batch.label[0].as_in_context(context)
        with autograd.record():
            output = model(data.astype(args.dtype, copy=False))
            loss = loss_fn(output, label)
        loss.backward()
        trainer.step(args.batch_size)
        metric.update([label], [output])
        if nbatch % 10 == 0:
            name, acc = metric.get()
            logging.info("[Epoch %d Batch %d] Training: %s=%f", epoch, nbatch, name, acc)
    if hvd.rank() == 0:
        speed = nbatch * args.batch_size * hvd.size() / (time.time() - tic)
        logging.info("Epoch[%d]\tSpeed=%.2f samples/s", epoch, speed)

    # Evaluate model accuracy.
    _, train_acc = metric.get()
    name, val_acc = evaluate(model, val_data, context)
    val_acc = hvd.allreduce(nd.array([val_acc]), name="val_acc").asscalar()
    if hvd.rank() == 0:
        logging.info("Epoch[%d]\tTrain: %s=%f\tValidation: %s=%f", epoch, name, train_acc, name, val_acc)
    if hvd.rank() == 0 and epoch == args.epochs - 1:
        assert val_acc > 0.85, f"Achieved accuracy ({val_acc}) is lower than expected (0.85)"

flat = np.concatenate([one.data().asnumpy().ravel() for one in params.values()])
gathered = hvd.allgather(nd.array(flat[None]), name="weights").asnumpy()
print(f"rank {hvd.rank()}: equal: {bool((gathered == gathered[0]).all())}")
if hvd.rank() == 0:
    model.save_parameters(args.save)
