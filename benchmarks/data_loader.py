"""Images per second of loaders only: decode, random crop to 224 x 224, flip, batches of 64 on the CPU.

All contestants read the same photographs: class directories, or TFRecords and tars made from them. Each runs
in a separate process, in turn, with each number of workers or threads, and its best result counts. If others
use the machine too, CPU time is more reliable. Contestants whose package is missing are skipped and named:

  ringdance      hvd's loader on TFRecords and on tars
  torch          DataLoader and ImageFolder: Pillow, torchvision's RandomResizedCrop written out
  tf.data        decode_and_crop_jpeg and resize, as in TensorFlow's ImageNet scripts; "antialiased" resizes
                 like the others
  grain          MapDataset with threads; "ours" with ringdance's decoder instead of Pillow
  datasets       imagefolder with set_transform, in torch's DataLoader
  webdataset     the same tars in torch's DataLoader

example: python benchmarks/data_loader.py /data/photographs --seconds 3 --json result.json
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import about_machine

SIZE, BATCH = 224, 64


def plain(data: bytes) -> np.ndarray[Any, Any]:
    """Decode, crop and flip like torchvision's transforms with Pillow."""
    from PIL import Image

    from ringdance.data.boxes import random_box

    image = Image.open(io.BytesIO(data)).convert("RGB")
    box = random_box(*image.size, random.uniform)  # type: ignore[arg-type]
    image = image.crop(tuple(map(int, box))).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def collate(rows: list[Any]) -> tuple[Any, Any]:
    import torch

    return torch.from_numpy(np.stack([row[0] for row in rows])), torch.tensor([row[1] for row in rows])


def directories(directory: Path) -> list[tuple[Path, int]]:
    """List the files of class directories, as ImageFolder does."""
    classes = sorted(entry for entry in directory.iterdir() if entry.is_dir())
    return [(file, label) for label, entry in enumerate(classes) for file in sorted(entry.iterdir())]


class ImageFolder:
    """torchvision's data set of class directories, with transforms for training."""

    def __init__(self, directory: Path) -> None:
        self.files = directories(directory)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, label = self.files[index]
        return plain(file.read_bytes()), label


# ---------------------------------------------------------------- contestants: endless batches


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def ringdance(made: Path, workers: int, format: str) -> Iterator[Any]:
    from ringdance.data import Dataset, Loader

    loader = Loader(Dataset.open(made / format), BATCH, threads=workers)
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from (batch.images for batch in loader)
        epoch += 1


def torch_loader(data: Any, workers: int, **options: Any) -> Iterator[Any]:
    import torch

    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        data, BATCH, num_workers=workers, collate_fn=collate, persistent_workers=True, **options
    )
    return (images for images, _ in forever(loader))


def torch(made: Path, workers: int) -> Iterator[Any]:
    return torch_loader(ImageFolder(made / "classes"), workers, shuffle=True)


def tf_data(made: Path, workers: int, antialias: bool) -> Iterator[Any]:
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature((), tf.string),
        "image/class/label": tf.io.FixedLenFeature((), tf.int64),
    }

    def decode(record: Any) -> Any:
        row = tf.io.parse_single_example(record, features)
        data = row["image/encoded"]
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data), tf.zeros((1, 0, 4)), min_object_covered=0.0, area_range=(0.08, 1),
            aspect_ratio_range=(3 / 4, 4 / 3), max_attempts=10, use_image_if_no_bounding_boxes=True,
        )  # fmt: skip
        image = tf.io.decode_and_crop_jpeg(data, tf.concat([begin[:2], extent[:2]], 0), channels=3)
        image = tf.image.resize(image, (SIZE, SIZE), antialias=antialias)
        return tf.cast(tf.image.random_flip_left_right(image), tf.uint8), row["image/class/label"]

    data = tf.data.TFRecordDataset(str(made / "tfrecord" / "train-00000-of-00001.tfrecord")).repeat()
    data = data.shuffle(1000).map(decode, num_parallel_calls=workers, deterministic=False).batch(BATCH)
    return (images for images, _ in data.prefetch(2))


def grain(made: Path, workers: int, ours: bool) -> Iterator[Any]:
    import grain

    from ringdance.data import Dataset
    from ringdance.data.images import decode_into
    from ringdance.data.order import Draws

    data = Dataset.open(made / "tfrecord")

    def decode(index: int, draw: np.random.Generator) -> Any:
        if not ours:
            return plain(data.read(index))
        out = np.empty((SIZE, SIZE, 3), np.uint8)
        decode_into(out, data.read(index), Draws(0, int(draw.integers(1 << 30)), index))
        return out

    source = grain.MapDataset.range(len(data)).seed(1).shuffle().repeat().random_map(decode)
    read = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * BATCH)
    return iter(source.to_iter_dataset(read).batch(BATCH))


def datasets(made: Path, workers: int) -> Iterator[Any]:
    from datasets import Image, load_dataset

    data = load_dataset("imagefolder", data_dir=str(made / "classes"), split="train")
    data = data.cast_column("image", Image(decode=False))

    def transform(rows: Any) -> Any:
        read = [image["bytes"] or Path(image["path"]).read_bytes() for image in rows["image"]]
        return {"image": [plain(data) for data in read], "label": rows["label"]}

    data.set_transform(transform)
    return torch_loader(_Rows(data), workers, shuffle=True)


class _Rows:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.data[index]
        return row["image"], row["label"]


def webdataset(made: Path, workers: int) -> Iterator[Any]:
    import webdataset

    shards = sorted(map(str, (made / "webdataset").glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
    data = data.to_tuple("jpg", "cls").map_tuple(plain, int)
    return torch_loader(data, workers)


CONTESTANTS: dict[str, tuple[Callable[[Path, int], Iterator[Any]], str, tuple[int, ...]]] = {
    "ringdance, TFRecords": (functools.partial(ringdance, format="tfrecord"), "numpy", (1, 2, 3)),
    "ringdance, tars": (functools.partial(ringdance, format="webdataset"), "numpy", (1, 2, 3)),
    "torch": (torch, "torch", (1, 2, 3)),
    "tf.data": (functools.partial(tf_data, antialias=False), "tensorflow", (2, 3, 4)),
    "tf.data, antialiased": (functools.partial(tf_data, antialias=True), "tensorflow", (2, 3, 4)),
    "grain": (functools.partial(grain, ours=False), "grain", (2, 3, 16)),
    "grain, ours": (functools.partial(grain, ours=True), "grain", (2, 3, 16)),
    "datasets": (datasets, "datasets", (1, 2, 3)),
    "webdataset": (webdataset, "webdataset", (1, 2, 3)),
}  # fmt: skip
"""By name: function from directory and workers to batches; required package; numbers of workers to try."""

# ---------------------------------------------------------------- measuring


def measure(name: str, made: Path, workers: int, seconds: float) -> tuple[float, float]:
    """Return images/s after the first batches, and the CPU time per image in ms, in all processes."""
    batches = CONTESTANTS[name][0](made, workers)
    for _ in range(4):  # skip batches that were prepared during the start
        next(batches)
    images, start, used = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - start < seconds or not images:
        images += len(next(batches))
    return images / (time.perf_counter() - start), (cpu_seconds() - used) / images * 1e3


def cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])


def in_process(name: str, made: Path, workers: int, seconds: float) -> list[float] | None:
    """Call ``measure`` for a contestant in a separate process. Returns None if that fails."""
    command = [sys.executable, __file__, str(made), "--one", name, str(workers), "--seconds", str(seconds)]
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "HF_DATASETS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environ, timeout=60 + 10 * seconds
        )
    except subprocess.TimeoutExpired:
        print(f"{name} with {workers} workers hangs", file=sys.stderr)
        return None
    for line in done.stdout.splitlines():
        if line.startswith("images/s "):
            return [float(word) for word in line.split()[1:]]
    print(f"{name} with {workers} failed:\n{done.stderr[-600:]}", file=sys.stderr)
    return None


def prepare(photographs: Path, made: Path, least: int) -> int:
    """Write the photographs in all formats, repeated to at least ``least`` images. Returns their number."""
    from ringdance.data import write

    files = directories(photographs)
    for copy in range(math.ceil(least / len(files))):
        for file, _ in files:
            target = made / "classes" / file.parent.name / f"{copy}-{file.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file.resolve(), target)
    files = directories(made / "classes")
    random.Random(1).shuffle(files)
    write(made / "tfrecord", ((file.read_bytes(), label) for file, label in files))
    write(made / "webdataset", ((file.read_bytes(), label) for file, label in files), format="webdataset",
          shards=6)
    return len(files)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photographs", type=Path, help="a directory with one directory for each class")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all contestants (default: 2)")
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), help="names of contestants")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of workers to try for all")
    parser.add_argument("--json", type=Path, help="write numbers and machine to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, workers = options.one
        print("images/s", *measure(name, options.photographs, int(workers), options.seconds), flush=True)
        os._exit(0)  # do not wait for worker processes
    missing = {CONTESTANTS[name][1] for name in options.only}
    missing = {package for package in missing if importlib.util.find_spec(package) is None}
    names = [name for name in options.only if CONTESTANTS[name][1] not in missing]
    with tempfile.TemporaryDirectory() as directory:
        count = prepare(options.photographs, Path(directory), 2000)
        rates: dict[str, dict[int, list[list[float]]]] = {name: {} for name in names}
        for _ in range(options.rounds):
            for name in names:
                for workers in options.workers or CONTESTANTS[name][2]:
                    result = in_process(name, Path(directory), workers, options.seconds)
                    if result is not None:
                        rates[name].setdefault(workers, []).append(result)
    best = {
        name: max((statistics.mean(one[0] for one in results), workers) for workers, results in runs.items())
        for name, runs in rates.items() if runs
    }  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    print(f"{count} photographs, {cores} cores, batches of {BATCH}; missing: {', '.join(missing) or 'none'}")
    print(f"{'':22} images/s   each round       workers  of ringdance  CPU ms/image")
    first = next(iter(best.values()))[0]
    for name, (speed, workers) in best.items():
        rounds = " ".join(f"{one[0]:.0f}" for one in rates[name][workers])
        cpu = min(one[1] for one in rates[name][workers])
        print(f"{name:22} {speed:8.0f}   {rounds:15}  {workers:7}  {speed / first:12.2f}  {cpu:12.2f}")
    if options.json:
        about = {"machine": about_machine(), "images": count, "images/s, CPU ms/image": rates}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
