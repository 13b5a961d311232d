"""Train ResNet-50 with Keras 3 on any number of processes: ImageNet, your own images, or synthetic ones.

Try it on a laptop, without data; then with data, as `ringdance data prepare` writes it:

    ringdance run -np 2 python train_keras.py --preset laptop --synthetic --steps 20
    ringdance data prepare imagenet /data/ILSVRC2012 /data/imagenet --format tfrecord --shards 128
    ringdance run -np 8 python train_keras.py --preset 8xV100 --data /data/imagenet --checkpoints run1
    ringdance run -H node1:8,node2:8,node3:8,node4:8 python train_keras.py --preset 32 --data /data/imagenet

`ringdance recipes show resnet50` lists the presets: the hyper-parameters of published runs and their results.
Options override single values. The learning rate of a preset holds for its whole batch; with another number
of processes it is scaled with the batch.

A rank uses the GPU of its local rank, where there are GPUs. KERAS_BACKEND chooses tensorflow, torch or jax.

With --checkpoints a run that was stopped, even killed, goes on with the same command, also on another number
of processes: model, optimizer, epoch and position in the epoch are read from the newest checkpoint, and each
epoch still uses no image twice. Only rank 0 reads and writes that directory.

What rank 0 prints: a line every --log-every steps with the loss (cross-entropy and, with SGD, the L2 term),
images per second of all ranks and of each, the share of the time in which training waited for images, the
time so far with that of the runs before, the time left, and what it has cost, if --price-per-hour says what
all machines together cost. After every --evaluate-every epochs: top-1 and top-5 on the split `validation`,
each image counted once; if the data has none, on the images that were trained on, which the line says.

The last images of an epoch that are fewer than a whole batch are left out: others in each epoch.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from options import parser, schedule_of  # type: ignore[import-not-found]  # beside this file
from options import read as read_options
from presets import PRESETS, Preset  # type: ignore[import-not-found]  # beside this file

import ringdance.keras as hvd
from ringdance.data import Dataset, Synthetic
from ringdance.recipes.log import TRAINED_ON, ImageLog

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's pixels, R, G, B


# Model -----------------------------------------------------------------------------------------------


def resnet50(classes: int, image_size: int) -> Any:
    """Return ResNet-50 v1.5 (stride in the 3x3 convolutions), on pixels 0 to 255, channels last; logits."""
    layers = keras.layers

    def conv(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        if kernel > 1:  # as PyTorch pads, not as "same"
            x = layers.ZeroPadding2D(kernel // 2)(x)
        return layers.Conv2D(filters, kernel, stride, use_bias=False, kernel_initializer="he_normal")(x)

    def norm(x: Any, gamma: str = "ones") -> Any:
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)

    def block(x: Any, filters: int, stride: int) -> Any:
        y = layers.ReLU()(norm(conv(x, filters, 1)))
        y = layers.ReLU()(norm(conv(y, filters, 3, stride)))
        y = norm(conv(y, 4 * filters, 1), "zeros")  # a block begins as the identity: Goyal et al. 2017
        if stride > 1 or x.shape[-1] != 4 * filters:
            x = norm(conv(x, 4 * filters, 1, stride))
        return layers.ReLU()(layers.Add()([x, y]))

    images = keras.Input((image_size, image_size, 3), dtype="uint8")
    x = layers.Normalization(mean=MEAN, variance=np.square(DEVIATION))(images)
    x = layers.ReLU()(norm(conv(x, 64, 7, 2)))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for number in range(blocks):
            x = block(x, 64 << stage, 2 if stage and not number else 1)
    x = layers.GlobalAveragePooling2D()(x)
    start = keras.initializers.RandomNormal(stddev=0.01)
    logits = layers.Dense(classes, kernel_initializer=start, dtype="float32")(x)
    return keras.Model(images, logits)


def use_own_gpu() -> None:
    """Let this rank see the GPU of its local rank alone. With JAX: set CUDA_VISIBLE_DEVICES for each rank."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            mine = gpus[hvd.local_rank() % len(gpus)]
            tf.config.set_visible_devices(mine, "GPU")
            tf.config.experimental.set_memory_growth(mine, True)
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())


def build(preset: Preset, classes: int, accumulate: int) -> Any:
    """Return the compiled model, equal on all ranks, with an optimizer that has its variables."""
    keras.config.set_dtype_policy("float32" if preset.precision == "float32" else f"mixed_{preset.precision}")
    model = resnet50(classes, preset.image_size)
    passes: dict[str, Any] = {"gradient_accumulation_steps": accumulate if accumulate > 1 else None}
    if preset.optimizer == "lars":
        optimizer: Any = hvd.LARS(0.0, preset.momentum, preset.weight_decay, **passes)
    else:
        optimizer = keras.optimizers.SGD(0.0, preset.momentum, **passes)
        for weights in model.trainable_variables:
            if len(weights.shape) > 1:  # no decay of biases, nor of normalization's scales and offsets
                weights.regularizer = keras.regularizers.L2(preset.weight_decay / 2)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=preset.label_smoothing)
    # float16: compile() adds loss scaling; if a rank's gradients overflow, all ranks skip that step.
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.optimizer.build(model.trainable_variables)
    return model


# Training --------------------------------------------------------------------------------------------


def train_step(model: Any, batch: Any, rate: float, classes: int, passes: int) -> float:
    """Update the model by one batch, in so many passes; return the mean loss since ``reset_metrics``.

    With SGD the momentum is corrected where the rate changes, which makes it PyTorch's. LARS has none to
    correct: the rate of each step belongs to its velocity, as in the paper.

    Gradients are averaged over passes and ranks. The weights of the samples make that the mean over the
    samples of the global batch, also if it is short, or if a rank or a pass has none of it.
    """
    count = len(batch.labels)
    loss = 0.0
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    hvd.set_learning_rate(model.optimizer, rate, momentum_correction=not isinstance(inner, hvd.LARS))
    for rows in np.array_split(np.arange(count), passes):
        weight = batch.weight * passes * len(rows) / count
        rows = rows if len(rows) else np.arange(1)  # all ranks take part in the exchange: one image, weight 0
        targets = keras.utils.to_categorical(batch.labels[rows], classes)
        weights = np.full(len(rows), weight, np.float32)
        loss = model.train_on_batch(batch.images[rows], targets, sample_weight=weights)
    return float(loss)


def average_statistics(model: Any) -> None:
    """Average normalization's running means and variances, which each rank has of its own images."""
    for variable in model.non_trainable_variables:
        if "moving" in variable.path:
            variable.assign(hvd.allreduce(variable.value, name=variable.path))


def evaluate(model: Any, loader: Any) -> dict[str, float]:
    """Return "count", the images of all ranks, and "top1" and "top5", the shares that are right."""
    average_statistics(model)
    right = hvd.TopK((1, 5))
    loader.set_epoch(0)
    for batch in loader.batches():
        if batch.weight:  # else padding
            right.add(model.predict_on_batch(batch.images), batch.labels)
    return right.result()


class Checkpointer:
    """Saves and restores model, optimizer, and where the training is: step, epoch, position, seconds."""

    def __init__(self, directory: str | None, keep: int, model: Any) -> None:
        self.files = hvd.Checkpoints(directory, keep) if directory else None
        self.model = model
        # All of them: with averages of gradients, loss scale and counters.
        self.variables = [*model.variables, *model.optimizer.variables]

    def save(self, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint. A copy is made here, the file in the background."""
        if self.files is None:
            return
        average_statistics(self.model)
        arrays: dict[str, Any] = {}
        if hvd.rank() == 0:
            arrays = {f"v{number}": read(one) for number, one in enumerate(self.variables)}

        def write(path: Path) -> None:
            with open(path, "wb") as file:
                np.savez(file, state=np.array(json.dumps(state)), **arrays)

        self.files.save(state["step"], write)

    def restore(self) -> dict[str, Any]:
        """Load the newest checkpoint, or the fresh model of rank 0, on all ranks; return the state."""
        latest = self.files.read() if self.files is not None else None  # rank 0 reads, all have it
        if latest is None:
            hvd.broadcast_variables(self.variables, root_rank=0)
            return {"step": 0, "epoch": 0, "position": 0, "seconds": 0.0}
        with np.load(io.BytesIO(latest[1])) as saved:
            for number, one in enumerate(self.variables):
                one.assign(saved[f"v{number}"])
            state: dict[str, Any] = json.loads(str(saved["state"]))
        return state

    def close(self) -> None:
        """Wait for the last file."""
        if self.files is not None:
            self.files.close()


def read(variable: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a variable's value."""
    return np.array(keras.ops.convert_to_numpy(variable.value))


def train(
    given: argparse.Namespace, preset: Preset, model: Any, data: Any, check: Any, split: str
) -> None:
    """Train from the newest checkpoint to the last epoch; ``split``: what ``check`` is of."""
    per_rank = preset.batch_size * given.accumulate
    schedule = schedule_of(preset, given, len(data), per_rank * hvd.size())
    loader = hvd.image_loader(
        data, per_rank, image_size=preset.image_size, augment=preset.augment, shuffle=True, drop_last=True,
        seed=given.seed,
    ).loader
    checkpointer = Checkpointer(given.checkpoints, given.keep, model)
    state = checkpointer.restore()
    step, first, begin = state["step"], state["epoch"], state["position"]
    log = ImageLog(given, len(data), preset.epochs, state["seconds"])
    log.begin(step, first, begin)
    last = step + given.steps if given.steps else None
    classes = len(data.classes)
    for epoch in range(first, int(preset.epochs)):
        position = begin if epoch == first else 0
        loader.set_epoch(epoch, position)
        end = loader.plan.end
        model.reset_metrics()
        for batch in log.timed(loader.batches()):
            current = schedule(epoch + (batch.position - batch.count) / len(data))
            loss = train_step(model, batch, current, classes, given.accumulate)
            step, position = step + 1, batch.position
            log.use(step, epoch, batch)
            if step % given.log_every == 0 or position == end:
                log.line(step, epoch * len(data) + position, current, loss)
                model.reset_metrics()
            ended = {"epoch": epoch + 1, "position": 0} if position == end else {}
            done = {"step": step, "epoch": epoch, "position": position, "seconds": log.seconds()} | ended
            if step % given.checkpoint_every == 0 or position == end or step == last:
                checkpointer.save(done)
            if step == last:
                break
        over = epoch + 1 == int(preset.epochs)
        if position == end and given.evaluate_every and (over or (epoch + 1) % given.evaluate_every == 0):
            log.evaluation(step, epoch + 1, evaluate(model, check), split)
        if step == last:
            break
    checkpointer.close()
    log.close()


def main() -> None:
    """Train as the command line says."""
    given = read_options(parser(__doc__ or ""))
    hvd.init()
    use_own_gpu()
    preset = PRESETS[given.preset].overridden(given)
    keras.utils.set_random_seed(given.seed)
    data: Any = Synthetic(given.synthetic_images) if given.synthetic else Dataset.open(given.data, "train")
    found = given.data and (Path(given.data) / "validation.json").exists()
    check = Dataset.open(given.data, "validation") if found else data
    split = "validation" if found else TRAINED_ON
    model = build(preset, len(data.classes), given.accumulate)
    checks = hvd.image_loader(check, preset.batch_size, image_size=preset.image_size, augment=False).loader
    if hvd.rank() == 0:
        batch = preset.batch_size * given.accumulate * hvd.size()
        print(
            f"ResNet-50 with Keras on {keras.backend.backend()}: {hvd.size()} ranks, batch {batch:,}, "
            f"{preset.optimizer}, {preset.precision}, {preset.epochs:g} epochs of {len(data):,} images\n"
            f"preset {given.preset} ({preset.source}): {preset.expected}"
        )
    train(given, preset, model, data, checks, split)


if __name__ == "__main__":
    main()
    hvd.shutdown()
