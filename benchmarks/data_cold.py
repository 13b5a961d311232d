"""Images per second and reads per image from a cold page cache: single images, pieces, webdataset.

Needs Linux and root. The photographs are copied, repeatedly until there are --images, into TFRecords and tars
on a separate file system in a loop device. The kernel counts the device's reads, and limits them if
--reads-per-second is set (control group "blkio", version 1). The page cache is emptied before each epoch.
Images are decoded to 64 x 64, so that reading dominates. A read of up to 256 KiB counts as one, as for cloud
volumes.

example: python benchmarks/data_cold.py /data/photographs --reads-per-second 3000 --json result.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import about_machine
from data_loader import collate, directories

SIZE, BATCH, THREADS, SHARDS = 64, 64, 8, 8
GROUP = Path("/sys/fs/cgroup/blkio/ringdance-benchmark")


@contextmanager
def file_system(size: int, limit: int | None) -> Iterator[tuple[Path, str]]:
    """Yield an empty file system and its device.

    ``limit`` is the number of reads per second for this process and its children.
    """
    with tempfile.TemporaryDirectory() as directory:
        image, place = Path(directory) / "image", Path(directory) / "mounted"
        place.mkdir()
        image.touch()
        os.truncate(image, size)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        command = ["losetup", "--direct-io=on", "--find", "--show", image]
        device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        name = Path(device).name
        try:
            # Like cloud volumes: reads of at most 256 KiB, and the usual readahead.
            (Path("/sys/block") / name / "queue/max_sectors_kb").write_text("256")
            (Path("/sys/block") / name / "queue/read_ahead_kb").write_text("128")
            subprocess.run(["mount", device, place], check=True)
            if limit:
                GROUP.mkdir(exist_ok=True)
                number = (Path("/sys/block") / name / "dev").read_text().strip()
                (GROUP / "blkio.throttle.read_iops_device").write_text(f"{number} {limit}")
                (GROUP / "cgroup.procs").write_text(str(os.getpid()))
            yield place, name
        finally:
            if limit:
                (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
            subprocess.run(["umount", place], check=True)
            subprocess.run(["losetup", "--detach", device], check=True)
            if limit:
                GROUP.rmdir()


def reads(name: str) -> tuple[int, int]:
    """Return a device's number of reads, and the bytes read."""
    fields = (Path("/sys/block") / name / "stat").read_text().split()
    return int(fields[0]), int(fields[2]) * 512


def ringdance(made: Path, read_bytes: int) -> Iterator[Any]:
    from ringdance.data import Dataset, Loader

    data = Dataset.open(made / "tfrecord")
    return iter(Loader(data, BATCH, image_size=SIZE, threads=THREADS, read_bytes=read_bytes))


def webdataset(made: Path) -> Iterator[Any]:
    import torch
    import webdataset as wds

    from ringdance.data.images import decode_into
    from ringdance.data.order import Draws

    def decode(data: bytes) -> Any:
        import numpy as np

        out = np.empty((SIZE, SIZE, 3), np.uint8)
        decode_into(out, data, Draws(0, 0, random.getrandbits(30)))
        return out

    torch.set_num_threads(1)
    shards = sorted(map(str, (made / "webdataset").glob("*.tar")))
    data = wds.WebDataset(shards, shardshuffle=100, empty_check=False).shuffle(1000)
    data = data.to_tuple("jpg", "cls").map_tuple(decode, int)
    return iter(torch.utils.data.DataLoader(data, BATCH, num_workers=2, collate_fn=collate))


CONTESTANTS = {
    "each image by itself": lambda made: ringdance(made, 0),
    "pieces of 2 MiB": lambda made: ringdance(made, 2 << 20),
    "pieces of 512 KiB": lambda made: ringdance(made, 512 << 10),
    "webdataset": webdataset,
}


def prepare(photographs: Path, made: Path, images: int) -> None:
    """Write ``images`` images as TFRecords and as tars."""
    from ringdance.data import write

    files = directories(photographs)
    files = (files * -(-images // len(files)))[:images]
    random.Random(1).shuffle(files)
    for format in ("tfrecord", "webdataset"):
        samples = ((file.read_bytes(), label) for file, label in files)
        write(made / format, samples, format=format, shards=SHARDS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photographs", type=Path, help="a directory with one directory for each class")
    parser.add_argument("--images", type=int, default=20_000, help="default: 20,000")
    parser.add_argument("--reads-per-second", type=int, metavar="N", help="device limit; default: none")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all contestants (default: 3)")
    parser.add_argument("--json", type=Path, help="write numbers and machine to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        began, count = time.perf_counter(), 0
        for batch in CONTESTANTS[options.one](options.photographs):
            count += len(batch[0] if isinstance(batch, tuple) else batch.labels)
        print("images", count, time.perf_counter() - began, flush=True)
        os._exit(0)  # do not wait for worker processes
    names = [key for key in CONTESTANTS if key != "webdataset" or importlib.util.find_spec("webdataset")]
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    size = sum(file.stat().st_size for file, _ in directories(options.photographs))
    size = size // len(directories(options.photographs)) * options.images
    with file_system(3 * size + (256 << 20), options.reads_per_second) as (made, device):
        prepare(options.photographs, made, options.images)
        for _ in range(options.rounds):
            for name in names:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
                before = reads(device)
                command = [sys.executable, __file__, str(made), "--one", name]
                words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
                count, seconds = int(words[-2]), float(words[-1])
                assert count == options.images, (name, count)
                operations, amount = (b - a for a, b in zip(before, reads(device), strict=True))
                rates[name].append((count / seconds, operations / count, amount / size))
    limit = f"{options.reads_per_second:,} reads/s" if options.reads_per_second else "no limit"
    print(f"{options.images:,} photographs, {size / 1e9:.2f} GB, {limit}, cold page cache; medians")
    print(f"{'':24} images/s   each round                reads/image  bytes read / size")
    for name, rows in rates.items():
        middle = [sorted(row[n] for row in rows)[len(rows) // 2] for n in range(3)]
        rounds = " ".join(f"{row[0]:.0f}" for row in rows)
        print(f"{name:24} {middle[0]:8.0f}   {rounds:25} {middle[1]:11.3f}  {middle[2]:17.3f}")
    if options.json:
        about = {"machine": about_machine(), "limit": options.reads_per_second, "images": options.images}
        about |= {"images/s, reads/image, share of bytes": rates}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
