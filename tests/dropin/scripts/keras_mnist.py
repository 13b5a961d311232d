"""Keras's MNIST example as users write it for Horovod: fit with callbacks, a checkpoint on rank 0."""

import argparse
import os

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--directory", required=True)
parser.add_argument("--epochs", type=int, default=6)
arguments = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

digits = load_digits()
x = digits.images[..., None].astype("float32") / 16
y = digits.target
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
steps = len(load_digits().target) // hvd.size() // 32

model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Dropout(0.1),
    keras.layers.Flatten(),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(10, activation="softmax"),
])

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = 0.002 * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: using `lr = 1.0 * hvd.size()` from the very beginning leads to worse final accuracy.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    path = os.path.join(arguments.directory, "checkpoint-{epoch}.keras")
    callbacks.append(keras.callbacks.ModelCheckpoint(path))

# Horovod: write logs on worker 0.
verbose = 2 if hvd.rank() == 0 else 0
history = model.fit(
    x[: steps * 32], y[: steps * 32], 32, arguments.epochs, callbacks=callbacks, verbose=verbose
)

weights = hvd.allgather(np.concatenate([one.ravel() for one in model.get_weights()])[None], name="weights")
weights = keras.ops.convert_to_numpy(weights)
if hvd.rank() == 0:
    print(f"equal: {bool((weights == weights[0]).all())}")
    print(f"accuracy: {history.history['accuracy'][-1]:.4f}")
    print(f"lr: {history.history['lr'][-1]:.6f}")
    model = hvd.load_model(os.path.join(arguments.directory, f"checkpoint-{arguments.epochs}.keras"))
    print(f"loaded: {type(model.optimizer).__name__} {int(model.optimizer.iterations)}")
