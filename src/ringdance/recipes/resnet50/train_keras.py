"""Train ResNet-50 with Keras 3 on any number of processes: ImageNet, your own images, or synthetic ones.

Try it on a laptop without data first, then on data written by `ringdance data prepare`:

    ringdance run -np 2 python train_keras.py --preset laptop --synthetic --steps 20
    ringdance data prepare imagenet /data/ILSVRC2012 /data/imagenet --format tfrecord --shards 128
    ringdance run -np 8 python train_keras.py --preset 8xV100 --data /data/imagenet --checkpoints run1
    ringdance run -H node1:8,node2:8,node3:8,node4:8 python train_keras.py --preset 32 --data /data/imagenet

`presets.py` contains the presets, which are hyperparameters of published runs with their results. Options
override individual values. A preset's learning rate applies to its global batch. With a different number of
processes, the rate is scaled in proportion to the batch.

By default, the script trains the ResNet-50 below. With --model NAME, it trains any classifier from
keras.applications, such as MobileNetV2, using that model's preprocess_input. --weights FILE takes a file
written by the model's save_weights() or save().

KERAS_BACKEND selects tensorflow, torch or jax. With tensorflow and torch, if there are GPUs, each rank uses
the GPU whose number is its local rank.

With --checkpoints, the same command resumes a run that was stopped or killed, even with a different number of
processes. Model, optimizer, epoch and the position in the epoch are read from the newest checkpoint, and no
image is used twice in an epoch. Only rank 0 reads and writes the directory.

Every --log-every steps, rank 0 prints the mean loss (cross-entropy and, with SGD, the L2 term) and top-1
accuracy over the (augmented) images used for training since the previous line, the images per second in total
and per rank, the share of time that training waited for images, the elapsed time including earlier runs, and
the time left. With --price-per-hour, the price of all machines together, it also prints the cost so far.

After every --evaluate-every epochs, rank 0 prints top-1 and top-5 accuracy on the split `validation`. Each
image is counted once. If this split does not exist, the training images are evaluated instead, and the output
says so. The model with the best top-1 accuracy on `validation` is kept in the --checkpoints directory.
--evaluate prints its metrics again, and --export writes it for score.py.

Images at the end of an epoch that do not fill a global batch are skipped. Each epoch skips different images.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import shared  # type: ignore[import-not-found]  # in this directory

if __name__ == "__main__":
    # Handle --help and invalid options before importing Keras, which takes several seconds.
    shared.read(shared.parser(__doc__ or ""))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

try:
    import keras
except ImportError as error:
    chosen = f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}"
    raise SystemExit(f"{chosen}: {error}. Install it, or choose tensorflow, torch or jax.") from None
import numpy as np
from presets import PRESETS, Preset  # type: ignore[import-not-found]

import ringdance.keras as hvd
import ringdance.numpy
from ringdance.data import Batch

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # statistics of ImageNet's RGB values
Array = np.ndarray[Any, Any]


# Model -----------------------------------------------------------------------------------------------


def resnet50(classes: int, image_size: int, width: int = 64) -> Any:
    """Build ResNet-50 v1.5, in which the 3x3 convolutions are the strided ones.

    The input consists of channels-last pixels from 0 to 255. The output consists of logits.
    """
    layers = keras.layers

    def conv(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        if kernel > 1:  # pad symmetrically like PyTorch, unlike "same"
            x = layers.ZeroPadding2D(kernel // 2)(x)
        return layers.Conv2D(filters, kernel, stride, use_bias=False, kernel_initializer="he_normal")(x)

    def norm(x: Any, gamma: str = "ones") -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)

    def block(x: Any, filters: int, stride: int) -> Any:
        y = layers.ReLU()(norm(conv(x, filters, 1)))
        y = layers.ReLU()(norm(conv(y, filters, 3, stride)))
        y = norm(conv(y, 4 * filters, 1), "zeros")  # each block starts as the identity (Goyal et al. 2017)
        if stride > 1 or x.shape[-1] != 4 * filters:
            x = norm(conv(x, 4 * filters, 1, stride))
        return layers.ReLU()(layers.Add()([x, y]))

    images = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = layers.Normalization(mean=MEAN, variance=np.square(DEVIATION))(images)
    x = layers.ReLU()(norm(conv(x, width, 7, 2)))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            x = block(x, width << stage, 2 if stage and not number else 1)
    x = layers.GlobalAveragePooling2D()(x)
    start = keras.initializers.RandomNormal(stddev=0.01)
    logits = layers.Dense(classes, kernel_initializer=start, dtype="float32")(x)
    return keras.Model(images, logits)


def of_keras(name: str, classes: int, image_size: int) -> Any:
    """Build a classifier from keras.applications that takes pixels from 0 to 255 and returns logits."""
    known = [key for key, value in vars(keras.applications).items() if callable(value)]
    if name not in known:
        raise SystemExit(f"--model {name} is not a keras.applications model. Use one of {', '.join(known)}.")
    make = getattr(keras.applications, name)
    shape = (image_size, image_size, 3)
    try:
        body = make(weights=None, classes=classes, input_shape=shape, classifier_activation=None)
    except ValueError as error:
        raise SystemExit(f"--model {name} does not take images of {image_size} pixels: {error}") from None
    for layer in body.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # as in PyTorch, because MobileNetV2's 0.999 is too slow for short runs
    images = keras.Input(shape, dtype="uint8")
    pixels = sys.modules[make.__module__].preprocess_input(keras.ops.cast(images, "float32"))
    return keras.Model(images, keras.layers.Activation("linear", dtype="float32")(body(pixels)))


def use_own_gpu() -> None:
    """Use the GPU whose number is the local rank."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            own = gpus[hvd.local_rank() % len(gpus)]
            tf.config.set_visible_devices(own, "GPU")
            tf.config.experimental.set_memory_growth(own, True)
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    else:
        import jax

        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank()))


# Optimizer -------------------------------------------------------------------------------------------


class LARS(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Momentum SGD that adapts the learning rate of each layer to the norms of its weights and gradients.

    For each variable with more than one dimension::

        trust = 0.001 * |w| / (|g| + weight_decay * |w|)    1 if a norm is 0
        v = momentum * v + learning_rate * trust * (g + weight_decay * w)
        w = w - v

    Biases and the scales and offsets of normalization layers have one dimension. For these, the trust is 1
    and weight decay is not applied.
    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.
    """

    def __init__(self, momentum: float, weight_decay: float, **options: Any) -> None:
        super().__init__(learning_rate=0.0, **options)
        self.momentum = momentum
        self.decay = weight_decay  # not passed to the base class, whose weight decay is decoupled

    def build(self, variables: Any) -> None:
        """Create the velocity of each variable."""
        if not self.built:
            super().build(variables)
            self.velocities = [self.add_variable_from_reference(one, name="velocity") for one in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable and its velocity."""
        ops, velocity = keras.ops, self.velocities[self._get_variable_index(variable)]
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(gradient, variable.dtype)
        if len(variable.shape) > 1:
            # Compute norms in float32, because in float16 the squares could overflow.
            weights, slope = (
                ops.sqrt(ops.sum(ops.square(ops.cast(tensor, "float32")))) for tensor in (variable, gradient)
            )
            adapts = ops.logical_and(weights > 0, slope > 0)
            below = ops.where(adapts, slope + self.decay * weights, 1.0)
            trust = ops.where(adapts, 0.001 * weights / below, 1.0)
            rate, gradient = rate * ops.cast(trust, variable.dtype), gradient + self.decay * variable
        step = self.momentum * velocity + rate * gradient
        self.assign(velocity, step)
        self.assign_sub(variable, step)


# Training --------------------------------------------------------------------------------------------


class KerasImageModel:
    """This rank's compiled model. See Note [Models of recipes]."""

    framework, described = "keras", staticmethod(shared.described)

    def __init__(self, given: argparse.Namespace, preset: Preset, classes: int, checks: Any = None) -> None:
        self.preset, self.classes, self.passes = preset, classes, given.accumulate
        self.checks, precision = checks, preset.precision
        keras.config.set_dtype_policy("float32" if precision == "float32" else f"mixed_{precision}")
        if given.model:
            self.model: Any = of_keras(given.model, classes, preset.image_size)
        else:
            self.model = resnet50(classes, preset.image_size, given.width)
        passes: dict[str, Any] = {"gradient_accumulation_steps": self.passes if self.passes > 1 else None}
        if preset.optimizer == "lars":
            optimizer: Any = LARS(preset.momentum, preset.weight_decay, **passes)
        else:
            optimizer = keras.optimizers.SGD(0.0, preset.momentum, **passes)
            for weights in self.model.trainable_variables:
                if len(weights.shape) > 1:  # exclude biases and normalization layers
                    weights.regularizer = keras.regularizers.L2(preset.weight_decay / 2)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=preset.label_smoothing)
        # In float16, compile() adds loss scaling, and all ranks skip a step if a gradient overflows.
        self.model.compile(hvd.DistributedOptimizer(optimizer), loss, weighted_metrics=["accuracy"])
        self.model.optimizer.build(self.model.trainable_variables)
        # The state for checkpoints, including the optimizer's slots, the loss scale and counters.
        self.variables = [*self.model.variables, *self.model.optimizer.variables]

    def step(self, batch: Batch, rate: float) -> None:
        """Update the model with one batch, which is processed in one or more passes.

        With SGD, the momentum is corrected when the learning rate changes, so that updates match PyTorch's.
        LARS needs no correction, because its velocity includes the learning rate of each step.

        Gradients are averaged over passes and ranks. Sample weights make this average the mean over all
        samples in the global batch, even if the batch is short, or if a rank or a pass has no samples.
        """
        count, optimizer = len(batch.labels), self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        hvd.set_learning_rate(optimizer, rate, momentum_correction=not isinstance(inner, LARS))
        targets = keras.utils.to_categorical(batch.labels, self.classes)
        for rows in np.array_split(np.arange(count), self.passes):
            weight = batch.weight * self.passes * len(rows) / count
            rows = rows if len(rows) else np.arange(1)  # a rank without images uses one with weight 0
            weights = np.full(len(rows), weight, np.float32)
            self.last = self.model.train_on_batch(batch.images[rows], targets[rows], sample_weight=weights)

    def figures(self) -> dict[str, float]:
        """Return this rank's mean loss and top-1 accuracy since the last call."""
        loss, right = map(float, self.last)
        self.model.reset_metrics()
        return {"loss": loss, "top-1": right}

    def evaluate(self) -> dict[str, float]:
        """Return the number of images on all ranks ("count"), and top-1 and top-5 accuracy from 0 to 1."""
        self.average_statistics()
        right = hvd.TopK(shared.ranks_of(self.classes))
        self.checks.set_epoch(0)
        for batch in self.checks:
            if batch.weight:  # a batch of weight 0 is padding
                right.add(self.model.predict_on_batch(batch.images), batch.labels)
        return right.result()

    def average_statistics(self) -> None:
        """Average running means and variances over the ranks, which compute them from their own images."""
        statistics = [variable for variable in self.model.weights if "moving" in variable.path]
        values = [keras.ops.convert_to_numpy(variable.value) for variable in statistics]
        if values:
            means = ringdance.numpy.allreduce(values, name="statistics")
            for variable, value in zip(statistics, means, strict=True):
                variable.assign(value)

    def state(self) -> dict[str, Array]:
        """Return copies of the model's and the optimizer's variables, for a checkpoint."""
        return {f"v{number}": read_value(variable) for number, variable in enumerate(self.variables)}

    def restore(self, state: dict[str, Array]) -> None:
        """Restore a state returned by ``state``."""
        for number, variable in enumerate(self.variables):
            variable.assign(state[f"v{number}"])

    def load_weights(self, file: str) -> list[str]:
        """Load weights, but skip a head with a different shape. Returns the names of skipped weights."""
        body = self.body()
        before = {weights.path: read_value(weights) for weights in body.trainable_weights}
        try:
            body.load_weights(file)
            return []
        except ValueError:  # retry without layers whose shapes differ
            with warnings.catch_warnings(action="ignore"):
                body.load_weights(file, skip_mismatch=True)
        same = [one for one in body.trainable_weights if np.array_equal(before[one.path], read_value(one))]
        head = [weights.path for weights in same if len(weights.shape) > 1]
        if len(head) != 1 or head[0] != [path for path, weights in before.items() if weights.ndim > 1][-1]:
            raise ValueError(f"{len(head)} layers have different shapes, but only the head may differ")
        return head

    def body(self) -> Any:
        """Return the model from keras.applications, or the ResNet-50 above."""
        return next((layer for layer in self.model.layers if isinstance(layer, keras.Model)), self.model)

    def equal(self) -> None:
        """Broadcast rank 0's model to all other ranks."""
        hvd.broadcast_variables(self.variables, root_rank=0)

    def export(self, directory: Path) -> None:
        """Write model.weights.h5, which --weights can load, and model.keras for score.py."""
        self.body().save_weights(directory / "model.weights.h5")
        shares = keras.layers.Softmax(dtype="float32")(self.model.output)
        keras.Model(self.model.input, shares).save(directory / "model.keras")


def read_value(variable: Any) -> Array:
    """Return a copy of a variable's value."""
    return np.array(keras.ops.convert_to_numpy(variable.value))


def main() -> None:
    """Run the training script."""
    given = shared.read(shared.parser(__doc__ or ""))
    hvd.init()
    use_own_gpu()
    preset = PRESETS[given.preset].overridden(given)
    keras.utils.set_random_seed(given.seed)
    data, check, split = shared.datasets(given)
    loader, checks = shared.loaders(given, preset, ringdance.numpy.image_loader, data, check)
    model = KerasImageModel(given, preset, len(data.classes), checks)
    shared.train(given, preset, model, data, loader, split, f"Keras on {keras.backend.backend()}")


if __name__ == "__main__":
    main()
    hvd.shutdown()
