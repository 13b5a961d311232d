"""`ringdance data` in this process: source layouts, unusual images, errors, and data of other programs."""

from __future__ import annotations

import filecmp
import io
import json
import os
import resource
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ringdance.data import Dataset, Table, tfrecord, write
from ringdance.data.prepare.plan import SplitPlan
from ringdance.data.prepare.sources import find
from ringdance.errors import ArgumentError
from ringdance.tools.data import main

PIL = pytest.importorskip("PIL.Image")
CLASSES = ["n01440764", "n01443537", "n02119789"]


def image(number: int, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (48, 40)) -> bytes:
    """Return an image in one color that encodes its number."""
    data = io.BytesIO()
    PIL.new("RGB", size, (number * 37 % 256, number * 91 % 256, 64)).convert(mode).save(data, kind)
    return data.getvalue()


def turned() -> bytes:
    """Return an image whose EXIF data say that it is rotated by 90 degrees."""
    exif, data = PIL.Exif(), io.BytesIO()
    exif[0x0112] = 6
    PIL.open(io.BytesIO(image(9))).save(data, "JPEG", exif=exif)
    return data.getvalue()


def class_directories(root: Path, each: int = 4) -> dict[str, bytes]:
    """Write images in class directories and return them by name."""
    images = {f"{c}/{c}_{n}.JPEG": image(10 * k + n) for k, c in enumerate(CLASSES) for n in range(each)}
    for name, data in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return images


def flat_validation(root: Path, count: int = 6) -> dict[str, bytes]:
    root.mkdir(parents=True)
    images = {f"ILSVRC2012_val_{n:08}.JPEG": image(100 + n) for n in range(1, count + 1)}
    for name, data in images.items():
        (root / name).write_bytes(data)
    return images


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def run(*words: object) -> int:
    return main([str(word) for word in words])


def prepare(source: Path, destination: Path, *words: object) -> int:
    return run("prepare", "imagenet", source, destination, "-np", 1, *words)


def pairs(data: Dataset) -> set[tuple[bytes, int]]:
    return {(data.read(number), int(data.rows["label"][number])) for number in range(len(data))}


def by_class(images: dict[str, bytes]) -> set[tuple[bytes, int]]:
    return {(data, CLASSES.index(name.partition("/")[0])) for name, data in images.items()}


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_class_directories_keep_every_byte(tmp_path, capfd, format):
    images = class_directories(tmp_path / "src")
    assert prepare(tmp_path / "src", tmp_path / "dst", "--format", format, "--shards", 3) == 0
    dataset = Dataset.open(tmp_path / "dst")
    assert list(dataset.classes) == CLASSES
    assert pairs(dataset) == by_class(images)
    assert [file.samples for file in dataset.files] == [4, 4, 4]
    assert list(dataset.rows["label"]) != sorted(dataset.rows["label"])  # shuffled
    assert run("verify", tmp_path / "dst", "--decode") == 0
    capfd.readouterr()
    assert run("info", tmp_path / "dst") == 0
    assert f"train: 12 samples of 3 classes, in 3 files ({format}), " in capfd.readouterr().out


def labels_of_kaggle(base: Path, names: list[str], classes: list[str]) -> None:
    rows = [f"{Path(n).stem},{c} 10 20 30 40 {c} 1 2 3 4" for n, c in zip(names, classes, strict=True)]
    text = "\n".join(["ImageId,PredictionString", *reversed(rows)])
    (base / "LOC_val_solution.csv").write_text(text + "\n")


@pytest.mark.parametrize("below", ["", "ILSVRC", "ILSVRC/Data/CLS-LOC"])
def test_kaggle(tmp_path, below):
    base = tmp_path / "src"
    train = class_directories(base / "ILSVRC/Data/CLS-LOC/train")
    validation = flat_validation(base / "ILSVRC/Data/CLS-LOC/val")
    classes = [CLASSES[n % 3] for n in range(6)]
    labels_of_kaggle(base, sorted(validation), classes)
    assert prepare(base / below, tmp_path / "dst", "--shards", 2) == 0
    assert pairs(Dataset.open(tmp_path / "dst")) == by_class(train)
    dataset = Dataset.open(tmp_path / "dst", "validation")
    assert len(dataset.files) == 1
    expected = zip(sorted(validation), classes, strict=True)
    assert pairs(dataset) == {(validation[name], CLASSES.index(c)) for name, c in expected}


def official(base: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    train = class_directories(base.parent / "loose")
    base.mkdir()
    with tarfile.open(base / "ILSVRC2012_img_train.tar", "w") as outer:
        for c in reversed(CLASSES):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for name, data in train.items():
                    if name.startswith(c):
                        add(tar, name.partition("/")[2], data)
            add(outer, f"{c}.tar", inner.getvalue())
    validation = flat_validation(base.parent / "flat")
    with tarfile.open(base / "ILSVRC2012_img_val.tar", "w") as tar:
        for name, data in validation.items():
            add(tar, name, data)
    return train, validation


@pytest.mark.parametrize("labels", ["classes", "numbers"])
def test_official_tars(tmp_path, labels):
    train, validation = official(tmp_path / "src")
    names = sorted(validation)
    if labels == "classes":
        (tmp_path / "src/synset_labels.txt").write_text("".join(f"{CLASSES[n % 3]}\n" for n in range(6)))
    else:
        (tmp_path / "src/val.txt").write_text("".join(f"{name} {n % 3}\n" for n, name in enumerate(names)))
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 2) == 0
    assert pairs(Dataset.open(tmp_path / "dst")) == by_class(train)
    expected = {(validation[name], n % 3) for n, name in enumerate(names)}
    assert pairs(Dataset.open(tmp_path / "dst", "validation")) == expected


def test_unusual_images_are_converted_and_broken_ones_listed(tmp_path, capfd):
    images = class_directories(tmp_path / "src")
    first = tmp_path / "src" / CLASSES[0]
    good = image(7, size=(200, 160))
    noise = np.random.RandomState(0).randint(0, 256, (160, 200, 3), np.uint8)
    buffer = io.BytesIO()
    PIL.fromarray(noise).save(buffer, "JPEG")
    middle = bytearray(buffer.getvalue())
    middle[len(middle) // 2 : len(middle) // 2 + 200] = bytes(200)
    special = {
        "png.JPEG": image(1, "PNG"), "cmyk.JPEG": image(2, mode="CMYK"), "grey.JPEG": image(3, mode="L"),
        "short.JPEG": good[: len(good) // 2], "text.JPEG": b"<html>404</html>", "empty.JPEG": b"",
        "middle.JPEG": bytes(middle), "alpha.png": image(5, "PNG", "RGBA"), "turned.JPEG": turned(),
    }  # fmt: skip
    for name, data in special.items():
        (first / name).write_bytes(data)
    assert prepare(tmp_path / "src", tmp_path / "dst", "--max-broken", 2) == 2
    assert "too many broken items: 3 of 21 images in train" in capfd.readouterr().err
    assert not (tmp_path / "dst/train.json").exists()
    for _ in ("written", "already complete"):
        assert prepare(tmp_path / "src", tmp_path / "dst", "--max-broken", 3) == 3
    lines = [line.split("\t") for line in (tmp_path / "dst/train.problems.tsv").read_text().splitlines()]
    assert {(kind, name.partition("/")[2]) for kind, name, _ in lines} == {
        ("left out", "short.JPEG"), ("left out", "text.JPEG"), ("left out", "empty.JPEG"),
        ("converted", "png.JPEG"), ("converted", "cmyk.JPEG"), ("converted", "middle.JPEG"),
        ("converted", "alpha.png"), ("converted", "turned.JPEG"),
    }  # fmt: skip
    for number in (1, 2):  # the list does not depend on the number of processes
        again = tmp_path / f"again{number}"
        command = ["prepare", "imagenet", tmp_path / "src", again, "--max-broken", 3, "-np", number]
        assert run(*command) == 3
        assert filecmp.cmp(again / "train.problems.tsv", tmp_path / "dst/train.problems.tsv", shallow=False)
    dataset = Dataset.open(tmp_path / "dst")
    assert len(dataset) == 18
    sizes = {PIL.open(io.BytesIO(dataset.read(number))).size for number in range(len(dataset))}
    assert (40, 48) in sizes, "upright"
    assert {*by_class(images), (special["grey.JPEG"], 0)} < pairs(dataset)
    modes = {PIL.open(io.BytesIO(data)).mode for data, _ in pairs(dataset)}
    assert modes == {"RGB", "L"}
    assert run("verify", tmp_path / "dst", "--decode") == 0


def test_resize_makes_larger_images_smaller_and_keeps_the_others(tmp_path):
    (tmp_path / "src/a").mkdir(parents=True)
    x, y = np.meshgrid(np.linspace(0, 255, 400), np.linspace(0, 255, 300))
    pixels = np.stack([x, y, (x + y) / 2], -1).astype(np.uint8)
    PIL.fromarray(pixels).save(tmp_path / "src/a/large.jpg", quality=95)
    small = image(1)
    (tmp_path / "src/a/small.jpg").write_bytes(small)
    assert prepare(tmp_path / "src", tmp_path / "dst", "--resize", 60) == 0
    dataset = Dataset.open(tmp_path / "dst")
    data = {dataset.read(0), dataset.read(1)} - {small}
    with PIL.open(io.BytesIO(data.pop())) as made:
        assert made.size == (80, 60)
        expected = np.asarray(PIL.fromarray(pixels).resize((80, 60), PIL.LANCZOS), np.float32)
        assert np.abs(np.asarray(made, np.float32) - expected).mean() < 2


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (None, ["--shards", 4], "--shards 4 instead of 3"),
        (None, ["--resize", 64], "--resize 64 instead of none"),
        (None, ["--format", "webdataset"], "--format webdataset instead of tfrecord"),
        ("add", [], "other images (13 instead of 12"),
        ("size", [], "other images (12 instead of 12"),
    ],
)
def test_a_changed_option_or_source_is_refused(tmp_path, capfd, change, words, message):
    class_directories(tmp_path / "src")
    options = ["--shards", 3]
    assert prepare(tmp_path / "src", tmp_path / "dst", *options) == 0
    if change:
        name = "new.JPEG" if change == "add" else f"{CLASSES[0]}_1.JPEG"
        (tmp_path / "src" / CLASSES[0] / name).write_bytes(image(99) + b"x")
    assert prepare(tmp_path / "src", tmp_path / "dst", *options, *words) == 2
    assert message in capfd.readouterr().err
    assert prepare(tmp_path / "src", tmp_path / "dst", *options, *words, "--overwrite") == 0
    assert run("verify", tmp_path / "dst") == 0
    listed = {file.name for file in Dataset.open(tmp_path / "dst").files}
    assert {path.name for path in (tmp_path / "dst").glob("train-*")} == listed


def test_an_image_that_changed_at_equal_size_is_noticed(tmp_path, capfd):
    """Preparing from two states of the source is refused. For a complete data set, the change is reported."""
    class_directories(tmp_path / "src")
    changed = tmp_path / "src" / CLASSES[1] / f"{CLASSES[1]}_1.JPEG"
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 3) == 0
    changed.write_bytes(changed.read_bytes()[:-3] + b"x" + changed.read_bytes()[-2:])
    os.utime(changed, (1, 1))
    capfd.readouterr()
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 3) == 0
    stderr = capfd.readouterr().err
    assert "train: files with its images were changed or copied again since\ntrain: already" in stderr
    (tmp_path / "dst/train.json").unlink()  # as if the run had been interrupted
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 3) == 2
    assert "started differently. Now: files with its images were changed or copied" in capfd.readouterr().err


def test_an_index_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append(Path(paths[1]).name) or replace(*paths))
    monkeypatch.setattr(
        os, "fsync", lambda file: calls.append(Path(os.readlink(f"/proc/self/fd/{file}"))) or fsync(file)
    )
    data = write(tmp_path, [(image(1), 0)])
    for name in ("train.npy", "train.json"):
        before, after = calls[calls.index(name) - 1 : calls.index(name) + 2 : 2]
        assert before.name.startswith(f".{name}.")
        assert after == tmp_path
    assert data.files[0].name in calls


def test_errors_say_what_to_do(tmp_path, capfd):
    def refused(*words: object) -> str:
        assert prepare(tmp_path / "src", tmp_path / "dst", *words) == 2
        return capfd.readouterr().err

    assert "is not a directory" in refused()
    (tmp_path / "src").mkdir()
    assert "no images found. Looked for class directories" in refused()
    class_directories(tmp_path / "src/train")
    flat_validation(tmp_path / "src/val")
    assert "no label file was found. Looked for LOC_val_solution.csv" in refused()
    (tmp_path / "labels.txt").write_text("1\n2\n3\n1\n2\n3\n")
    assert "do not match the labels here. Use imagenet_2012" in refused("--labels", tmp_path / "labels.txt")
    (tmp_path / "labels.txt").write_text("n01440764\n")
    assert "has 1 labels, but there are 6 images" in refused("--labels", tmp_path / "labels.txt")
    assert "train has 12 images. Use 1 to 12." in refused("--split", "train", "--shards", 13)
    (tmp_path / "src/train/n09999999").mkdir()
    assert "classes without images: n09999999" in refused("--split", "train")
    (tmp_path / "src/train/n09999999/instances.json").touch()
    assert "is not divided into classes: n09999999 contains instances.json" in refused("--split", "train")
    shutil.rmtree(tmp_path / "src/train/n09999999")
    assert not list((tmp_path / "dst").glob("train*"))
    assert run("prepare", "imagenet", tmp_path / "src", tmp_path / "src/train/dst", "--split", "train") == 2
    assert "src/train, whose directories are classes" in capfd.readouterr().err


def test_a_full_disk_leaves_nothing_half_written(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python would silently truncate its .pyc files
    class_directories(tmp_path / "src", 40)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 2) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capfd.readouterr().err
    assert "train-00000-of-00002.tfrecord: File too large" in error
    assert "Stopped. The same command resumes" in error
    assert [path.name for path in (tmp_path / "dst").iterdir()] == [".prepare"]
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shards", 2) == 0


def test_what_an_interrupted_run_has_left_damaged_is_done_again(tmp_path, capfd, monkeypatch):
    class_directories(tmp_path / "src")
    out, words = tmp_path / "dst", (tmp_path / "src", tmp_path / "dst", "--shards", 2)
    assert prepare(*words) == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    first = "train-00000-of-00002.tfrecord"
    for name in (f"{first}.json", f"{first}.rows.npy", "train.json"):
        for part in (0, 0.5):
            with monkeypatch.context() as patch:
                patch.setattr(SplitPlan, "close", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    prepare(*words, "--overwrite")
            path = out / ".prepare" / name
            os.truncate(path, int(path.stat().st_size * part))
            if name == "train.json":
                assert prepare(*words) == 2
                assert f"{path} is damaged. Start again with --overwrite" in capfd.readouterr().err
                assert prepare(*words, "--overwrite") == 0
            else:
                assert prepare(*words) == 0
            assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == whole
    os.truncate(path := out / "train-00001-of-00002.tfrecord", 99)
    assert prepare(*words) == 2
    assert f"{path} is damaged: it has 99 bytes" in capfd.readouterr().err


def test_verify_finds_damage_of_every_kind(tmp_path, capfd):
    class_directories(tmp_path / "src")
    prepare(tmp_path / "src", tmp_path / "dst", "--shards", 4, "--format", "tfrecord")
    names = [tmp_path / "dst" / file.name for file in Dataset.open(tmp_path / "dst").files]
    data = bytearray(names[0].read_bytes())
    data[300] ^= 1
    names[0].write_bytes(data)
    names[1].write_bytes(names[1].read_bytes()[:-1])
    names[2].unlink()
    capfd.readouterr()
    assert run("verify", tmp_path / "dst") == 1
    lines = capfd.readouterr().out.splitlines()
    assert f"{names[0]}: checksum" in lines[0]
    assert f"{names[1]}: {names[1].stat().st_size} bytes instead of" in lines[1]
    assert "No such file" in lines[2]
    assert lines[-1] == "3 problems"


DAMAGE = {
    "train.json": [b"", b"[]", b"{}", b"\xff\x00random", b"[" * 100_000, b'{"version": 1, "forma'],
    "train.npy": [b"", b"random bytes that are no array"],
}


def test_a_damaged_index_is_named(tmp_path, capfd):
    """`info`, `verify` and `Dataset.open()` name the damaged file, the problem and the fix."""
    directory = tmp_path / "dst"
    class_directories(tmp_path / "src")
    prepare(tmp_path / "src", directory)
    for name, damages in DAMAGE.items():
        whole = (directory / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-50:] = bytes(50)
        for data in [*damages, whole[:-9], bytes(flipped)]:
            (directory / name).write_bytes(data)
            capfd.readouterr()
            with pytest.raises(ArgumentError, match=rf"{directory}/train.*is damaged: .+ Copy it again"):
                Dataset.open(directory)
            assert run("info", directory) == 2
            assert "train" in (error := capfd.readouterr().err)
            assert "damaged" in error
            assert run("verify", directory) == (1 if (directory / "train.npy").exists() else 2)
            assert "Traceback" not in capfd.readouterr().err
        (directory / name).write_bytes(whole)
    assert run("verify", directory) == 0


def test_an_index_that_was_changed_is_named(tmp_path):
    class_directories(tmp_path / "src")
    prepare(tmp_path / "src", tmp_path / "dst")
    path = tmp_path / "dst/train.json"
    path.write_text(path.read_text().replace('"samples": 12', '"samples": 11'))
    with pytest.raises(ArgumentError, match=rf"{path} is damaged: its checksum does not match"):
        Dataset.open(tmp_path / "dst")


def test_a_damaged_file_of_rows_is_named(tmp_path, capfd):
    run("generate", "criteo", tmp_path, "--rows", 1000)
    [path] = tmp_path.glob("train-*.npy")
    path.write_bytes(path.read_bytes().replace(b"(1000,)", b"(1000(("))
    with pytest.raises(ArgumentError, match=rf"{path} is damaged: "):
        Table.open(tmp_path).read(np.arange(9))


def test_what_would_not_end_or_not_be_written_is_refused(tmp_path, capfd):
    """FIFOs, links to parent directories and names that are not UTF-8 are refused before any work."""
    class_directories(tmp_path / "src")

    def refused() -> str:
        capfd.readouterr()
        assert prepare(tmp_path / "src", tmp_path / "dst") == 2
        assert not list((tmp_path / "dst").glob("train*"))
        return capfd.readouterr().err

    for name in (f"{CLASSES[0]}/x.JPEG", "x.JPEG"):
        os.mkfifo(tmp_path / "src" / name)
        assert f"{name} is named like an image, but is not a regular file" in refused()
        (tmp_path / "src" / name).unlink()
    for name in ("up", f"{CLASSES[1]}/up"):
        (tmp_path / "src" / name).symlink_to("..")
        assert f"{name} links to a directory above it" in refused()
        (tmp_path / "src" / name).unlink()
    for name in ("n00000001", f"{CLASSES[1]}/more", "train"):
        (tmp_path / "src" / name).symlink_to("nowhere")
        assert f"/{name}" in (error := refused())
        assert "is a broken link" in error or "train: No such file" in error
        (tmp_path / "src" / name).unlink()
    ring = [tmp_path / "src" / c / "next" for c in CLASSES]  # each links to the next class
    for link, to in zip(ring, [*CLASSES[1:], CLASSES[0]], strict=True):
        link.symlink_to(f"../{to}")
    assert f"{CLASSES[0]}/next/next/next links to a directory above it" in refused()
    for link in ring:
        link.unlink()
    (tmp_path / "src" / CLASSES[0]).rename(tmp_path / "src" / os.fsdecode(b"\xff\xfe"))
    assert "the name of the class '\\udcff\\udcfe' is not UTF-8" in refused()


def test_looking_through_a_source_holds_no_objects_of_its_images(tmp_path):
    """Finding ImageNet-21k's 14 million images takes less than 100 bytes each, including 31 for the name."""
    for number in range(10_000):
        name = f"n{number // 300:08}/n{number // 300:08}_{number:05}.JPEG"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mknod(tmp_path / name)
    tracemalloc.start()
    try:
        [part] = find(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100 * 10_000
    finally:
        tracemalloc.stop()
    assert len(part.ends) == len(part.places) == 10_000
    assert [part.name(number) for number in (0, 9_999)] == ["n00000000/n00000000_00000.JPEG", name]
    assert part.places["label"].tolist() == [number // 300 for number in range(10_000)]


@pytest.mark.parametrize("begun", ["train.json", "criteo.json"])
def test_info_after_an_interruption_says_to_resume(tmp_path, capfd, begun):
    """`info` says to resume in every phase of a stopped run, and after too many broken images."""
    (tmp_path / "dst/.prepare" / begun).mkdir(parents=True)
    assert run("info", tmp_path / "dst") == 2
    assert "run the same command again to resume" in (error := capfd.readouterr().err)
    assert "data index" not in error


def test_half_an_index_is_no_circle(tmp_path, capfd):
    """If half of an index is missing, `verify`, `info` and `prepare` say so and name a fix that works."""
    class_directories(tmp_path / "src/train")
    flat_validation(tmp_path / "src/val")
    (tmp_path / "labels.txt").write_text("n01440764\n" * 6)
    words = (tmp_path / "src", tmp_path / "dst", "--labels", tmp_path / "labels.txt")
    assert prepare(*words) == 0
    for name, other in (("train.npy", "train.json"), ("train.json", "train.npy")):
        (tmp_path / "dst" / name).unlink()
        for command in ("verify", "info"):
            capfd.readouterr()
            assert run(command, tmp_path / "dst") == (1 if command == "verify" else 2)
            output = "".join(capfd.readouterr())
            assert name in output
            assert other in output
            assert "--overwrite" in output
        if name == "train.npy":
            assert prepare(*words) == 2
            assert "its companion file train.npy is missing" in capfd.readouterr().err
        assert prepare(*words, "--overwrite") == 0
        assert run("verify", tmp_path / "dst") == 0
    (tmp_path / "dst/train.json").unlink()
    (tmp_path / "dst/train.npy").unlink()
    assert run("verify", tmp_path / "dst") == 1
    assert "run the same command again" in capfd.readouterr().out
    assert prepare(*words) == 0
    assert run("verify", tmp_path / "dst", "--decode") == 0


def test_images_of_an_unfinished_run_are_not_those_of_click_logs(tmp_path, monkeypatch, capfd):
    class_directories(tmp_path / "src")
    monkeypatch.setattr("ringdance.data.prepare.plan.SplitPlan.close", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "rows.txt").write_text("1\t" + "\t" * 38 + "\n")
    before = {path for path in (tmp_path / "dst").rglob("*") if "train" in path.name}
    for words in (), ("--overwrite",):
        assert run("prepare", "criteo", tmp_path / "rows.txt", tmp_path / "dst", "-np", 1, *words) == 2
        assert "do not belong to any index or unfinished run" in capfd.readouterr().err
    assert {path for path in (tmp_path / "dst").rglob("*") if "train" in path.name} == before


def test_generated_rows_replace_all_that_was_prepared(tmp_path, capfd):
    (tmp_path / "rows.txt").write_text(("1\t" + "\t" * 38 + "\n") * 50)
    words = ("prepare", "criteo", tmp_path / "rows.txt", tmp_path / "dst", "-np", 1, "--validation", 0.5)
    assert run(*words) == 0
    assert run("generate", "criteo", tmp_path / "dst", "--rows", 100, "--overwrite") == 0
    assert run("verify", tmp_path / "dst") == 0
    assert len(Table.open(tmp_path / "dst", "train")) == 100
    assert run(*words) == 2
    assert "started differently" in capfd.readouterr().err


def test_a_validation_without_rows_leaves_no_file(tmp_path, capfd):
    (tmp_path / "rows.txt").write_text(("1\t" + "\t" * 38 + "\n") * 20)
    words = ("prepare", "criteo", tmp_path / "rows.txt", tmp_path / "dst", "-np", 1, "--validation", 1e-6)
    assert run(*words, "--shards", 1) == 0
    assert not list((tmp_path / "dst").glob("validation*"))
    assert run("verify", tmp_path / "dst") == 0


def test_a_table_without_half_its_index_is_not_well(tmp_path, capfd):
    words = (tmp_path, "--rows", 100, "--validation", 0.5, "--overwrite")
    assert run("generate", "criteo", *words) == 0
    (tmp_path / "train.json").unlink()
    assert run("verify", tmp_path) == 1
    assert "train.json" in capfd.readouterr().out
    assert run("generate", "criteo", *words) == 0
    with pytest.raises(ArgumentError, match=r"Existing splits: train, validation\.$"):
        Table.open(tmp_path, "test")


def test_other_json_beside_the_data_is_no_index(tmp_path, capfd):
    class_directories(tmp_path / "src")
    prepare(tmp_path / "src", tmp_path / "dst")
    for data in ('[{"id": 1}]', "[[1]]", "3", '{"a": 1}'):
        (tmp_path / "dst/x.json").write_text(data)
        assert run("verify", tmp_path / "dst") == run("info", tmp_path / "dst") == 0


@pytest.mark.parametrize("layout", ["official", "classes"])
def test_a_tar_that_was_cut_is_named(tmp_path, capfd, layout):
    official(tmp_path / "src")
    path = tmp_path / "src/ILSVRC2012_img_train.tar"
    if layout == "classes":
        with tarfile.open(path) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            tar.extractall(tmp_path / "src/train")
        path = tmp_path / "src/train" / f"{CLASSES[1]}.tar"
    path.write_bytes(path.read_bytes()[:900])
    assert prepare(tmp_path / "src", tmp_path / "dst", "--split", "train") == 2
    assert f"{path} is damaged or incomplete: unexpected end of data" in capfd.readouterr().err


def test_records_of_others_whose_classes_have_no_name(tmp_path):
    for number, synset in enumerate((b"", b"\xff\0", b"n01")):
        values = {"image/class/label": number + 1, "image/class/synset": synset}
        data = image(number)
        record = tfrecord.framed(tfrecord.encode(values, "image/encoded", data) + data)
        (tmp_path / f"train-{number}").write_bytes(record)
    assert run("index", tmp_path) == run("verify", tmp_path, "--decode") == 0
    assert Dataset.open(tmp_path).classes == ["0", "\ufffd", "n01"]


def test_an_index_of_tars_made_by_others(tmp_path, capfd):
    images = [image(number) for number in range(4)]
    with tarfile.open(tmp_path / "shard-000000.tar", "w") as tar:
        for number, data in enumerate(images):
            if number % 2:
                add(tar, f"./{number:05}.json", json.dumps({"label": number, "text": "x"}).encode())
            add(tar, f"./{number:05}.seg.png", b"a mask")
            add(tar, f"./{number:05}.jpg", data)
            if not number % 2:
                add(tar, f"./{number:05}.cls", b"%d\n" % number)
    assert run("index", tmp_path) == 0
    dataset = Dataset.open(tmp_path)
    assert [dataset.read(number) for number in range(4)] == images
    assert list(dataset.rows["label"]) == [0, 1, 2, 3]
    assert run("verify", tmp_path, "--decode") == 0
    with tarfile.open(tmp_path / "val-000000.tar", "w") as tar:
        add(tar, "1.jpg", images[0])
    capfd.readouterr()
    assert run("index", tmp_path) == 2
    assert "val-000000.tar: 1.jpg: no .cls or .json with this name" in capfd.readouterr().err


def test_webdataset_reads_our_tars(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    images = class_directories(tmp_path / "src")
    assert prepare(tmp_path / "src", tmp_path / "dst", "--format", "webdataset", "--shards", 2) == 0
    pattern = str(tmp_path / "dst/train-{00000..00001}-of-00002.tar")
    samples = list(webdataset.WebDataset(pattern, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls"))
    data = Dataset.open(tmp_path / "dst")
    assert [label for _, label in samples] == list(data.rows["label"])
    for number, (pixels, _) in enumerate(samples):
        assert (pixels == np.asarray(PIL.open(io.BytesIO(data.read(number))))).all()
    assert len(samples) == len(images)
