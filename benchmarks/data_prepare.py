"""Compare `ringdance data prepare` with typical scripts for the same task.

What: ``--images`` JPEGs are created once in class directories under ``--cache``, by cropping and re-encoding
the photographs in ``--photographs``. Then the contestants run one after another, each in a separate process
that ends with ``fsync``:

- ours, TFRecords and tars, with ``--np`` processes; each image is decoded to detect damage;
- plain script: one process, Pillow decodes each image, ``tarfile`` writes;
- TensorFlow: ``tf.data`` reads and decodes in parallel to get the image's size, ``TFRecordWriter`` writes, as
  in TensorFlow's own ImageNet script;
- webdataset: one process, ``ShardWriter`` copies the bytes without decoding;
- the bounds: read all files, compute two checksums, write one file; and the same with our check of each
  image. One process each.

At the end, ours starts again, is killed with SIGKILL when half of the files exist, and resumes with the same
command. All files must have the same bytes as in the first run.

How to read: "x plain" is the rate relative to the plain script. The new files are in the page cache, so
nothing waits for the disk. CPU includes all processes and their start. On a machine with other work, it is
more reliable than the rate.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pool
from pathlib import Path

import google_crc32c
import numpy as np
import simplejpeg
from common import format_table
from PIL import Image

HERE = Path(__file__).resolve()
CLASSES = 100


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.one:
        PEERS[arguments.one](images(arguments.cache), arguments.cache / "out")
        return
    source = make(arguments.photographs, arguments.cache, arguments.images, arguments.np)
    names = images(arguments.cache)
    size = sum(os.path.getsize(name) for name in names)
    print(f"{len(names)} JPEGs, {size / 1e6:.0f} MB, {arguments.np} processes for ours")
    ours = {
        f"ours, {form}": prepare(source, arguments, form) for form in ("tfrecord", "webdataset")
    }  # fmt: skip
    seconds, cpu = {}, {}
    for name, line in {**ours, **{key: peer(key, arguments) for key in PEERS}}.items():
        remove(arguments.cache / "out")
        began, before = time.perf_counter(), _cpu_of_children()
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: skipped: {done.stderr.strip().splitlines()[-1]}")
            continue
        seconds[name], cpu[name] = time.perf_counter() - began, _cpu_of_children() - before
        print(f"{name}: {seconds[name]:.1f} s", flush=True)
    rates = {name: len(names) / value for name, value in seconds.items()}
    columns = ("", "images/s", "MB/s", "x plain", "of the bound", "CPU ms an image")
    bound = rates["bound: bytes and checksums"]
    rows = [
        (name, f"{rate:.0f}", f"{rate * size / len(names) / 1e6:.0f}", f"{rate / rates['plain script']:.2f}",
         f"{rate / bound:.2f}", f"{cpu[name] / len(names) * 1e3:.2f}")
        for name, rate in rates.items()
    ]  # fmt: skip
    print(format_table(columns, rows))
    if arguments.json:
        record = {"images": len(names), "bytes": size, "images_per_s": rates, "cpu_s": cpu}
        arguments.json.write_text(json.dumps(record))
    print(resumed(arguments, ours["ours, tfrecord"]))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = made.add_argument
    photographs = HERE.parents[2] / "shared/data/imagenet-sample"
    add("--photographs", type=Path, default=photographs, metavar="DIR", help="class directories of JPEGs")
    cache = HERE.parents[1] / "build/data_prepare"
    add("--cache", type=Path, default=cache, metavar="DIR", help="directory for all files")
    add("--images", type=int, default=20_000, metavar="N", help="number of JPEGs (20000)")
    add("--np", type=int, default=2, metavar="N", help="processes for ours (2)")
    add("--json", type=Path, metavar="FILE", help="write the rates to FILE")
    add("--one", help=argparse.SUPPRESS)
    return made


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make(photographs: Path, cache: Path, count: int, processes: int) -> Path:
    """Create the JPEGs unless they exist, and return their directory."""
    source = cache / f"src-{count}"
    (cache / "current").unlink(missing_ok=True)
    if not (source / "complete").exists():
        paths = sorted(path for path in photographs.rglob("*") if path.is_file())
        if not paths:
            raise SystemExit(f"--photographs {photographs} has no files")
        for number in range(CLASSES):
            (source / f"n{number:08}").mkdir(parents=True, exist_ok=True)
        with Pool(processes) as pool:
            pool.starmap(_crop, [(paths[n % len(paths)], n, source) for n in range(count)], chunksize=100)
        (source / "complete").touch()
    (cache / "current").symlink_to(source)
    return source


def _crop(path: Path, number: int, source: Path) -> None:
    pixels = simplejpeg.decode_jpeg(path.read_bytes(), "RGB")
    random = np.random.RandomState(number)
    high, wide = (max(1, int(side * random.uniform(0.7, 1.0))) for side in pixels.shape[:2])
    top, left = (random.randint(0, pixels.shape[k] - side + 1) for k, side in enumerate((high, wide)))
    part = np.ascontiguousarray(pixels[top : top + high, left : left + wide])
    data = simplejpeg.encode_jpeg(part, int(random.randint(85, 96)), "RGB", "420")
    (source / f"n{number % CLASSES:08}" / f"{number}.JPEG").write_bytes(data)


def images(cache: Path) -> list[str]:
    """Return all JPEGs in shuffled order, as in our shards."""
    names = sorted(str(path) for path in (cache / "current").glob("n*/*.JPEG"))
    return [names[number] for number in np.random.RandomState(1).permutation(len(names))]


def remove(directory: Path) -> None:
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    directory.mkdir()


def prepare(source: Path, arguments: argparse.Namespace, form: str) -> list[str]:
    return [
        sys.executable, "-m", "ringdance", "data", "prepare", "imagenet", str(source),
        str(arguments.cache / "out"), "--format", form, "--shards", "32", "-np", str(arguments.np),
    ]  # fmt: skip


def peer(name: str, arguments: argparse.Namespace) -> list[str]:
    return [sys.executable, str(HERE), "--cache", str(arguments.cache), "--one", name]


def resumed(arguments: argparse.Namespace, line: Sequence[str]) -> str:
    """Kill ours when half of the files exist, resume it, and compare all bytes with an uninterrupted run."""
    out = arguments.cache / "out"
    remove(out)
    subprocess.run(line, capture_output=True, check=True)
    whole = {path.name: google_crc32c.value(path.read_bytes()) for path in out.glob("train*")}
    remove(out)
    job = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    while len(list(out.glob("train-*"))) < 16 and job.poll() is None:
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    job.wait()
    time.sleep(2)  # its processes exit on their own
    there = len(list(out.glob("train-*")))
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    again = {path.name: google_crc32c.value(path.read_bytes()) for path in out.glob("train*")}
    said = next(line for line in done.stderr.splitlines() if line.startswith("Resuming"))
    if again != whole:
        raise SystemExit("the files differ after SIGKILL and resuming")
    return f"killed with SIGKILL at {there} of 32 files; {said}; {len(whole)} files have the same bytes"


# ---------------------------------------------------------------- the others, each in its own process


def plain(names: Sequence[str], out: Path) -> None:
    with open(out / "train.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for number, name in enumerate(names):
            data = Path(name).read_bytes()
            with Image.open(io.BytesIO(data)) as image:
                image.load()
            label = str(int(Path(name).parent.name[1:])).encode()
            for end, content in (("jpg", data), ("cls", label)):
                member = tarfile.TarInfo(f"{number:08}.{end}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())


def tensorflow(names: Sequence[str], out: Path) -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    def read(name: object) -> tuple[object, object, object]:
        data = tf.io.read_file(name)
        return name, data, tf.shape(tf.io.decode_jpeg(data))

    def integer(*values: int) -> object:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def string(value: bytes) -> object:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    paths = tf.data.Dataset.from_tensor_slices(list(names))
    target = str(out / "train.tfrecord")
    with tf.io.TFRecordWriter(target) as writer:
        read_ahead = paths.map(read, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        for name, data, shape in read_ahead.as_numpy_iterator():
            synset = name.split(b"/")[-2]
            feature = {
                "image/encoded": string(data), "image/class/label": integer(int(synset[1:]) + 1),
                "image/class/synset": string(synset), "image/filename": string(name.split(b"/")[-1]),
                "image/format": string(b"JPEG"), "image/height": integer(shape[0]),
                "image/width": integer(shape[1]), "image/colorspace": string(b"RGB"),
                "image/channels": integer(3),
            }  # fmt: skip
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    _sync(Path(target))


def webdataset(names: Sequence[str], out: Path) -> None:
    import webdataset as wds

    size = len(names) // 32 + 1
    with wds.ShardWriter(str(out / "train-%05d.tar"), maxcount=size, verbose=0) as writer:
        for number, name in enumerate(names):
            label = str(int(Path(name).parent.name[1:]))
            writer.write({"__key__": f"{number:08}", "jpg": Path(name).read_bytes(), "cls": label})
    for path in out.iterdir():
        _sync(path)


def bound(names: Sequence[str], out: Path, check: bool = False) -> None:
    crc = 0
    with open(out / "train", "wb", buffering=1 << 20) as file:
        for name in names:
            with open(name, "rb", buffering=0) as image:
                data = image.read()
            if check:
                simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1)
            crc = google_crc32c.extend(crc, data)
            google_crc32c.value(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def checked_bound(names: Sequence[str], out: Path) -> None:
    bound(names, out, check=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


PEERS: dict[str, Callable[[Sequence[str], Path], None]] = {
    "plain script": plain,
    "tf.data and TFRecordWriter": tensorflow,
    "webdataset, no decoding": webdataset,
    "bound: bytes and checksums": bound,
    "bound: the same and our check": checked_bound,
}

if __name__ == "__main__":
    main()
