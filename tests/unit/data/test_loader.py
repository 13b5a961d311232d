"""The data loader: exact resumption with any number of ranks and threads, and no threads left."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sampled import part

from ringdance.data import Dataset, Loader, SyntheticLoader, images, write
from ringdance.data.boxes import centre_box, random_box
from ringdance.data.images import decode_into
from ringdance.data.open_files import OpenFiles
from ringdance.data.order import BatchPlan, Draws, by_pieces
from ringdance.errors import ArgumentError

SIZES = range(1, 6)


def encoded(pixels: Any, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


class Memory:
    """Small images of random colors in memory, encoded as JPEG."""

    def __init__(self, length: int) -> None:
        random = np.random.RandomState(1)
        shapes = random.randint(20, 60, (length, 2))
        colours = [random.randint(0, 256, (2, 2, 3), np.uint8) for _ in range(length)]
        images = [
            Image.fromarray(colour).resize((int(wide), int(high)), Image.Resampling.BICUBIC)
            for colour, (wide, high) in zip(colours, shapes, strict=True)
        ]
        self.data = [encoded(image) for image in images]
        self.rows = {"label": np.arange(length) % 7}

    def __len__(self) -> int:
        return len(self.data)

    def read(self, number: int) -> bytes:
        return self.data[number]


@pytest.mark.parametrize("shuffle", [False, True])
def test_resumed_at_any_size_each_sample_is_seen_once(shuffle: bool) -> None:
    """Read part of an epoch with one number of ranks, continue with another, and finish with a third."""
    cases = list(itertools.product((0, 7, 31), (1, 3), itertools.product(SIZES, repeat=3)))
    for length, batch, (first, second, third) in part("resumed at any size", cases, 60):
        whole = BatchPlan(length, batch, shuffle, 5, 0, 1)
        whole.set_epoch(2)
        order = [sample for numbers, *_ in whole.batches() for sample in numbers.tolist()]
        seen: list[int] = []
        position = 0
        for size, steps in ((first, 2), (second, 1), (third, 10**6)):
            plans = [BatchPlan(length, batch, shuffle, 5, rank, size) for rank in range(size)]
            for plan in plans:
                plan.set_epoch(2, position)
            assert len({len(plan) for plan in plans}) == 1
            rounds = list(zip(*[list(plan.batches()) for plan in plans], strict=True))
            assert len(rounds) == len(plans[0])
            for parts in rounds[:steps]:
                consumed = [numbers.tolist() for numbers, weight, _, _ in parts if weight]
                assert {end for _, _, end, _ in parts} == {position + sum(map(len, consumed))}
                assert {count for *_, count in parts} == {sum(map(len, consumed))}
                assert all(1 <= len(numbers) <= batch for numbers, *_ in parts)
                # The average over ranks of weight times a rank's mean is the mean over all samples.
                means = [weight * np.mean(numbers) for numbers, weight, _, _ in parts]
                assert np.isclose(np.mean(means), np.mean([*itertools.chain(*consumed)]))
                seen += [*itertools.chain(*consumed)]
                position = parts[0][2]
        assert seen == order
        assert Counter(seen) == Counter(range(length))


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1), (2, 2)])
def test_short_batches_are_left_out_also_after_a_resumption(first: int, second: int) -> None:
    """Each of 31 samples is used at most once, and only in whole batches of 4 per rank."""
    order = BatchPlan(31, 4, True, 5, 0, 1)
    everything = [sample for numbers, *_ in order.batches() for sample in numbers.tolist()]
    seen: list[int] = []
    position = 0
    for size, steps in ((first, 2), (second, 10**6)):
        plans = [BatchPlan(31, 4, True, 5, rank, size, drop_last=True) for rank in range(size)]
        for plan in plans:
            plan.set_epoch(0, position)
        assert {plan.end for plan in plans} == {31 - (31 - position) % (4 * size)}
        assert plans[0].position_after(10**6) == plans[0].end
        rounds = list(zip(*[list(plan.batches()) for plan in plans], strict=True))
        assert len(rounds) == len(plans[0])
        for parts in rounds[:steps]:
            assert [len(numbers) for numbers, *_ in parts] == [4] * size
            seen += [sample for numbers, *_ in parts for sample in numbers.tolist()]
            position = parts[0][2]
    assert position == plans[0].end
    assert seen == everything[:position]
    with pytest.raises(ArgumentError, match="Use batch_size=6 or less"):
        BatchPlan(31, 7, True, 5, 0, 5, drop_last=True)


def pixels_of(loader: Loader) -> dict[int, bytes]:
    return {
        int(number): image.tobytes()
        for batch in loader for number, image in zip(batch.indices, batch.images, strict=True) if number >= 0
    }  # fmt: skip


def test_a_sample_is_augmented_alike_on_any_rank() -> None:
    data = Memory(13)
    by_size = []
    for size in (1, 3, 5):
        parts: dict[int, bytes] = {}
        for rank in range(size):
            loader = Loader(data, 2, image_size=16, seed=3, rank=rank, size=size, threads=1 + rank % 3)
            loader.set_epoch(1)
            own_pixels = pixels_of(loader)
            assert not own_pixels.keys() & parts.keys()
            parts |= own_pixels
        by_size.append(parts)
    assert by_size[0] == by_size[1] == by_size[2]
    assert sorted(by_size[0]) == list(range(13))
    loader.set_epoch(2)
    assert all(by_size[0][number] != image for number, image in pixels_of(loader).items())


def test_a_transform_follows_the_crop_and_draws_alike_on_any_rank() -> None:
    def transform(image: Any, draw: Draws) -> Any:
        assert image.shape == (16, 16, 3)
        return image // 2 + np.uint8(draw(0, 100))

    data = Memory(13)
    runs = [
        pixels_of(Loader(data, 13, image_size=16, seed=3, shuffle=False, threads=threads, transform=chosen))
        for threads, chosen in ((1, transform), (3, transform), (1, None))
    ]
    assert runs[0] == runs[1]
    pixels = [np.array([np.frombuffer(run[number], np.uint8) for number in range(13)]) for run in runs]
    added = (pixels[0] - pixels[2] // 2).reshape(13, -1)
    assert (added == added[:, :1]).all(), "The transform must get the cropped image."
    assert len({*added[:, 0].tolist()}) > 5, "Each sample must get different random draws."
    for wrong in (lambda image, draw: image / 255, lambda image, draw: image[:, :, :1]):
        with pytest.raises(ArgumentError, match="transform returned"):
            next(iter(Loader(data, 13, image_size=16, augment=False, transform=wrong)))


def test_a_rank_without_samples_gets_padding_of_weight_0() -> None:
    last = [list(Loader(Memory(4), 1, image_size=8, rank=rank, size=3))[-1] for rank in range(3)]
    assert [batch.weight for batch in last] == [3, 0, 0]
    assert [batch.indices.tolist()[0] >= 0 for batch in last] == [True, False, False]
    assert [(batch.position, batch.count, batch.images.shape) for batch in last] == [(4, 1, (1, 8, 8, 3))] * 3


def test_labels_follow_their_samples() -> None:
    for loader in (Loader(Memory(10), 4, image_size=8), SyntheticLoader(10, 4, 8, 7)):
        loader.set_epoch(0, 3)
        assert len(loader) == 2
        batches = list(loader)
        assert [len(batch.labels) for batch in batches] == [4, 3]
        for batch in batches:
            assert batch.labels.tolist() == (batch.indices % 7).tolist()
            assert (batch.images.dtype, batch.labels.dtype) == ("uint8", "int64")
            assert len(batch.images) == len(batch.labels)


@pytest.fixture(autouse=True)
def no_threads_of_other_tests() -> Iterator[None]:
    yield
    until = time.monotonic() + 20
    while decoding() and time.monotonic() < until:
        # the next epoch's threads exit with their loader once they have finished their current work
        gc.collect()
        time.sleep(0.02)
    assert not decoding()


def decoding() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringdance-decode")]


def test_no_thread_is_left() -> None:
    loader = Loader(Memory(20), 2, image_size=8, threads=3)
    for _ in loader:
        break
    assert not decoding()
    held = iter(loader)
    next(held)
    assert decoding()
    loader.close()
    assert not decoding()
    assert list(held) == []
    assert sum(len(batch.labels) for batch in loader) == 20
    assert decoding()  # threads of the next epoch
    loader.close()
    assert not decoding()


def test_the_next_epoch_is_prepared_while_this_one_ends() -> None:
    data = Memory(20)
    read = data.read
    numbers: list[int] = []
    data.read = lambda number: (numbers.append(number), read(number))[1]  # type: ignore[method-assign]
    loader = Loader(data, 3, image_size=8, seed=4, prefetch=2)

    def labels(epoch: int, position: int = 0) -> list[Any]:
        loader.set_epoch(epoch, position)
        return [(batch.indices.tolist(), batch.images.tobytes(), batch.position) for batch in loader]

    first = labels(0)
    assert loader._following is not None
    loader._following.next()
    assert len(numbers) >= 20 + 3
    loader.close()
    assert labels(0) == first
    assert loader._following is not None
    second = labels(1)  # the epoch that was prepared
    assert second == labels(1) != first  # not the prepared epoch, which is epoch 2
    assert loader._following is None  # nor does it prepare another epoch
    assert labels(1, 6) == second[2:]
    assert labels(0) == first


def test_an_attribute_that_is_set_holds_for_all_of_the_next_epoch() -> None:
    loader = Loader(Memory(20), 2, image_size=8, prefetch=3)
    list(loader)
    loader.set_epoch(1)
    loader.image_size = 16
    assert {batch.images.shape[1] for batch in loader} == {16}
    loader.set_epoch(2)
    loader.transform = lambda image, draw: np.full_like(image, 7)
    assert {int(value) for batch in loader for value in np.unique(batch.images)} == {7}
    loader.close()


LARGE = """
import os, signal, sys, time
import numpy as np
from ringdance.data import Loader

class Data:
    rows, files, calls = {"label": np.zeros(400, int)}, [type("File", (), {"size": 400})], []
    def __len__(self): return 400
    def read(self, number): return IMAGE
    def will_need(self, first, stop):
        time.sleep(0.02)
        os.write(1, b"r")

import io
from PIL import Image
file = io.BytesIO()
Image.new("RGB", (20, 20)).save(file, "JPEG")
IMAGE = file.getvalue()
"""


def run_script(text: str) -> str:
    command = [sys.executable, "-c", LARGE + text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_read_for_an_epoch_that_nobody_will_ask_for() -> None:
    output = run_script("""
loader = Loader(Data(), 40, image_size=8, read_bytes=2)
list(loader)
os.write(1, b"end")
""")
    assert output.partition("end")[2].count("r") <= 8  # by its four threads; 180 are submitted


def test_a_forked_process_prepares_its_epochs_itself() -> None:
    output = run_script("""
loader = Loader(Data(), 40, image_size=8, threads=2)
list(loader)
loader.set_epoch(1)
begun = iter(Loader(Data(), 40, image_size=8, threads=2))
next(begun)
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
    print(len(list(loader)), len(list(begun)))
else:
    signal.alarm(20)
    print(len(list(loader)), flush=True)
    try:
        next(begun)
    except ValueError as error:
        print(error, flush=True)
    loader.close()
    os._exit(0)
""")
    assert output == "10\nA forked process cannot continue its parent's iteration. Start a new one.\n10 9\n"


def test_a_file_that_opens_slowly_holds_up_no_other() -> None:
    slow, begun = threading.Event(), threading.Event()

    def opened(number: int, path: Path) -> Path:
        if number == 0:
            begun.set()
            assert slow.wait(20)
        return path

    files = OpenFiles(lambda number: Path(str(number)), opened, 3)
    assert files(1) == Path("1")
    thread = threading.Thread(target=files, args=(0,))
    thread.start()
    begun.wait(20)
    assert [files(1), files(2)] == [Path("1"), Path("2")]
    slow.set()
    thread.join()


def test_a_data_set_that_was_read_is_pickled_and_copied(tmp_path: Path) -> None:
    write(tmp_path, ((image, 0) for image in Memory(6).data), shards=3)
    data = Dataset.open(tmp_path)
    first = data.read(0)
    assert pickle.loads(pickle.dumps(data)).read(0) == copy.deepcopy(data).read(0) == first


def test_iterations_of_one_loader_do_not_end_one_another() -> None:
    loader = Loader(Memory(20), 2, image_size=8, seed=3)
    expected = [batch.indices.tolist() for batch in loader]
    left = iter(loader)
    next(left)
    other = iter(loader)
    indices = [next(other).indices.tolist()]
    del left  # in the middle of its epoch
    gc.collect()
    indices += [batch.indices.tolist() for batch in other]
    assert indices == expected
    first, second = iter(loader), iter(loader)
    for first_batch, second_batch, numbers in zip(first, second, expected, strict=True):
        assert first_batch.indices.tolist() == second_batch.indices.tolist() == numbers


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_file_stays_open_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ((image, 0) for image in Memory(6).data), shards=3)
    data = Dataset.open(tmp_path)
    pread, names = os.pread, []

    def read(number: int, size: int, offset: int) -> bytes:
        data.close()  # as another thread does when it needs the descriptor
        names.append(os.readlink(f"/proc/self/fd/{number}"))
        return pread(number, size, offset)

    monkeypatch.setattr(os, "pread", read)
    data.will_need(0, 6)
    assert names == [str((tmp_path / file.name).resolve()) for file in data.files]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_order_by_pieces_has_each_sample_once_with_any_number_of_ranks(size: int) -> None:
    length, piece = 10_007, 16
    plans = [BatchPlan(length, 24 // size, True, 5, rank, size, piece=piece) for rank in range(size)]
    rounds = [list(plan.batches()) for plan in plans]
    used = [np.concatenate([part[0][: len(part[0]) if part[1] else 0] for part in parts]) for parts in rounds]
    assert np.sort(np.concatenate(used)).tolist() == list(range(length))
    # Resume on two ranks after 100 batches. They read the remaining samples, with the same total batch size.
    again = [BatchPlan(length, 12, True, 5, rank, 2, piece=piece) for rank in range(2)]
    for plan in again:
        plan.set_epoch(0, 2400)
    left = [part for plan in again for part in plan.batches()]
    rest = np.concatenate([part[0][: len(part[0]) if part[1] else 0] for part in left])
    before = np.concatenate([part[0] for parts in rounds for part in parts[:100]])
    assert np.sort(np.concatenate([before, rest])).tolist() == list(range(length))
    other = BatchPlan(length, 24, True, 5, 0, 1, piece=piece)
    other.set_epoch(1)
    assert next(other.batches())[0].tolist() != next(iter(rounds[0]))[0].tolist()


@pytest.mark.parametrize(("length", "piece"), [(1, 1), (100, 7), (10_007, 16), (65_536, 64), (999, 1000)])
def test_the_order_by_pieces_is_that_of_random_places(length: int, piece: int) -> None:
    """The order equals a sort of all samples by random places, which takes much more memory."""
    random = np.random.RandomState([5, 1])
    place = np.argsort(random.permutation(-(-length // piece)))
    lane, begin = np.repeat(place % 64, piece)[:length], np.repeat(place // 64, piece)[:length]
    sorted_order = np.lexsort((begin + 4 * random.random_sample(length), lane))
    counts = np.bincount(lane)
    turns = np.concatenate([np.arange(count) for count in counts])
    order, lanes = by_pieces(length, piece, 5, 1)
    assert order.tolist() == sorted_order[np.argsort(turns, kind="stable")].tolist()
    assert lanes.tolist() == (place % 64).tolist()


def test_the_order_by_pieces_needs_little_memory() -> None:
    tracemalloc.start()
    try:
        by_pieces(300_000, 31, 5, 1)
        # 55 bytes per sample if all are sorted at once
        assert tracemalloc.get_traced_memory()[1] < 28 * 300_000
    finally:
        tracemalloc.stop()


def test_ranks_read_pieces_of_their_own_which_a_batch_mixes() -> None:
    length, piece, size = 65_536, 16, 4
    plans = [BatchPlan(length, 64, True, 5, rank, size, piece=piece) for rank in range(size)]
    pieces = [[set((part[0] // piece).tolist()) for part in plan.batches()] for plan in plans]
    read = sum(len(set.union(*batches)) for batches in pieces)
    assert read == length // piece  # because the number of lanes divides the batch size
    assert np.mean([len(set.union(*some)) for some in zip(*pieces, strict=True)]) > 150  # of at most 256
    odd = [BatchPlan(length, 50, True, 5, rank, size, piece=piece) for rank in range(size)]
    read = sum(len({*np.concatenate([part[0] for part in plan.batches()]) // piece}) for plan in odd)
    assert read < 1.25 * length // piece


def test_pieces_are_read_before_their_samples(tmp_path: Path) -> None:
    photograph = Memory(1).data[0]
    write(tmp_path, ((photograph, number % 7) for number in range(200)), shards=3)
    data = Dataset.open(tmp_path)
    asked: list[tuple[int, int]] = []
    will_need = data.will_need

    def noted(first: int, stop: int) -> None:
        asked.append((first, stop))
        will_need(first, stop)

    object.__setattr__(data, "will_need", noted)
    loader = Loader(data, 8, image_size=8, read_bytes=10 * len(photograph), rank=1, size=2)
    piece = loader.piece  # fewer than 10, because each record has a frame
    assert 5 < piece < 10
    seen = np.concatenate([batch.indices for batch in loader])
    expected = {(start, start + piece) for start in (seen // piece * piece).tolist()}
    loader.close()
    assert set(asked) >= expected  # plus the first batches of the next epoch
    asked.clear()
    list(Loader(data, 8, image_size=8, read_bytes=4096, augment=False, rank=1, size=2))
    assert sorted(asked) == [*((first, first + 8) for first in range(8, 192, 16)), (196, 200)]
    assert Loader(data, 8).piece == 0  # only used for 16 GiB or more
    with pytest.raises(ArgumentError, match="read_bytes=-1 is negative"):
        Loader(data, 8, read_bytes=-1)


def test_a_yielded_batch_is_not_written_again() -> None:
    loader = Loader(Memory(20), 2, image_size=8)
    batches = [(batch, batch.images.copy()) for batch in loader]
    assert all((batch.images == copy).all() for batch, copy in batches)


def test_a_broken_image_is_named() -> None:
    data = Memory(9)
    data.data[5] = data.data[5][:200]
    loader = Loader(data, 3, image_size=8, augment=False, rank=1, size=2)
    with pytest.raises(ArgumentError, match="rank 1: sample 5: the image cannot be decoded"):
        list(loader)
    assert not decoding()
    data.data[5] = b""
    with pytest.raises(ArgumentError, match="sample 5"):
        list(loader)


def test_other_failures_of_threads_are_raised() -> None:
    data = Memory(9)
    data.rows = {"label": np.arange(4)}  # allocating a batch fails
    with pytest.raises(IndexError):
        list(Loader(data, 3, image_size=8))
    assert not decoding()


@pytest.mark.parametrize("kind", ["RGB", "L", "CMYK", "PNG", "palette"])
def test_formats(kind: str) -> None:
    colour = Image.new("RGB", (40, 30), (200, 40, 90))
    data = {
        "RGB": lambda: encoded(colour, quality=95), "L": lambda: encoded(colour.convert("L")),
        "CMYK": lambda: encoded(colour.convert("CMYK"), quality=95), "PNG": lambda: encoded(colour, "PNG"),
        "palette": lambda: encoded(colour.quantize(4), "PNG"),
    }[kind]()  # fmt: skip
    out = np.zeros((16, 16, 3), np.uint8)
    decode_into(out, data, Draws(0, 0, 0))
    expected = [colour.convert("L").getpixel((0, 0))] * 3 if kind == "L" else [200, 40, 90]
    assert np.abs(out.astype(int) - expected).max() <= 4


def test_sixteen_bits_are_scaled_and_transparent_pixels_are_white() -> None:
    out = np.zeros((8, 8, 3), np.uint8)
    decode_into(out, encoded(np.full((30, 40), 32_896, np.uint16), "PNG"))
    assert (out == 128).all()
    decode_into(out, encoded(np.full((30, 40, 4), (200, 40, 90, 0), np.uint8), "PNG"))
    assert (out == 255).all()
    palette = Image.new("P", (40, 30))
    palette.putpalette([200, 40, 90])
    decode_into(out, encoded(palette, "PNG", transparency=0))
    assert (out == 255).all()
    with pytest.raises(ArgumentError, match="unknown range"):
        decode_into(out, encoded(np.full((30, 40), 0.5, np.float32), "TIFF"))
    with pytest.raises(ArgumentError, match=r"cannot be decoded \(Pillow cannot identify the image format\)"):
        decode_into(out, b"<html>404")


@pytest.mark.parametrize("side", [350, 224, 56])
def test_the_centre_is_that_of_resize_and_crop(side: int) -> None:
    """The center is right even if the JPEG is decoded at a reduced size."""
    wave = np.sin(np.arange(512) / 25)[:, None, None] * np.cos(np.arange(1024) / 30)[None, :, None]
    picture = Image.fromarray((127 + 120 * wave * [1, 0.5, -1]).astype(np.uint8))
    out = np.zeros((side, side, 3), np.uint8)
    decode_into(out, encoded(picture, quality=98))
    short = round(side * 256 / 224)
    resized = picture.resize((2 * short, short), Image.Resampling.BILINEAR)
    left, top = (resized.width - side) // 2, (resized.height - side) // 2
    expected = np.asarray(resized.crop((left, top, left + side, top + side)), int)
    assert np.abs(out - expected).mean() < 4
    assert np.abs(out[:, ::-1] - expected).mean() > 15


def test_random_parts() -> None:
    flips = 0
    areas = []
    for number in range(400):
        draw = Draws(1, 2, number)
        left, top, right, bottom = random_box(500, 375, draw)
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 375
        assert 0.74 < (right - left) / (bottom - top) < 1.35
        areas.append((right - left) * (bottom - top) / (500 * 375))
        flips += draw() < 0.5
    assert 0.07 < min(areas) < 0.12
    assert 0.38 < np.mean(areas) < 0.48  # large boxes fit less often
    assert 160 < flips < 240
    # no box has an allowed aspect ratio, so the center is used
    assert random_box(1000, 10, Draws(0, 0, 0))[3] == 10
    assert centre_box(640, 480) == (110, 30, 530, 450)


def test_wrong_arguments() -> None:
    data = Memory(3)
    for options in (
        {"batch_size": 0}, {"batch_size": 1, "rank": 2, "size": 2}, {"batch_size": 1, "threads": 0},
        {"batch_size": 1, "seed": -1}, {"batch_size": 1, "prefetch": 0},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            Loader(data, **options)
    loader = Loader(data, 1)
    with pytest.raises(ArgumentError, match="for a data set of 3 samples"):
        loader.set_epoch(0, 4)


def test_without_opencv_the_pixels_are_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    noise = np.random.RandomState(2).randint(0, 256, (9, 12, 3), np.uint8)
    data = [*Memory(40).data, encoded(Image.fromarray(noise).resize((400, 300)))]
    for number, encoded_image in enumerate(data):
        decoded = []
        for _ in range(2):
            decoded.append(np.zeros((24, 24, 3), np.uint8))
            decode_into(decoded[-1], encoded_image, Draws(0, 0, number))
            monkeypatch.setattr(images, "cv2", None)
        monkeypatch.undo()
        assert np.abs(decoded[0].astype(int) - decoded[1]).mean() < 5
