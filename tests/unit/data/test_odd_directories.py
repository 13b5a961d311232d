"""Directories as users have them: each sample is either in the data set, or counted and named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import criteo_lines

from ringdance.data import Dataset, Table, planted, tfrecord
from ringdance.data.tables.criteo import COLUMNS
from ringdance.tools.data import main

PIL = pytest.importorskip("PIL.Image")
arrow = pytest.importorskip("pyarrow")
Make = Callable[[Path], object]


def image(number: int, kind: str = "JPEG") -> bytes:
    data = io.BytesIO()
    PIL.new("RGB", (16, 12), (number * 37 % 256, 90, 64)).save(data, kind)
    return data.getvalue()


JPG, PNG, WEBP = image(1), image(2, "PNG"), image(3, "WEBP")


def tar(path: Path, *members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT, mode: str = "w") -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as file:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.size = len(data)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            if data.startswith(b"-> "):
                member.type, member.linkname, member.size = tarfile.LNKTYPE, data[3:].decode(), 0
            file.addfile(member, io.BytesIO(data))
    return path.read_bytes()


def shard(*pairs: tuple[str, bytes, str], **options: object) -> Make:
    """Return a maker of a tar with a label file for each image, from tuples (name, image, label)."""
    members = [
        member
        for name, data, label in pairs
        for member in (
            (name, data),
            (f"{name.rpartition('.')[0]}.{'json' if label[:1] == '{' else 'cls'}", label.encode()),
        )
    ]
    return lambda root: tar(root / "train-0.tar", *members, **options)  # type: ignore[arg-type]


def members(*found: tuple[str, bytes], **options: object) -> Make:
    return lambda root: tar(root / "train-0.tar", *found, **options)  # type: ignore[arg-type]


def record(label: object, data: bytes | None = JPG, key: str = "label") -> bytes:
    if isinstance(label, float):
        number = struct.pack("<f", label)
        body = tfrecord.entry(key, tfrecord.FLOAT_LIST, len(number)) + number
    else:
        values = {} if label is None else {key: label}
        body = b"".join(tfrecord._feature(name, value) for name, value in values.items())
    if data is not None:
        body += tfrecord.entry("image", tfrecord.BYTES_LIST, len(data)) + data
    return tfrecord.framed(tfrecord.delimited(1, body))


def records(*found: bytes, name: str = "train.tfrecord") -> Make:
    return lambda root: (root / name).write_bytes(b"".join(found))


def both(*makers: Make) -> Make:
    return lambda root: [make(root) for make in makers]


def damaged(root: Path) -> None:
    """Write a tar of four images and overwrite the header of the second one."""
    data = bytearray(
        tar(
            root / "train-0.tar",
            *[(f"{n}.{end}", content) for n in range(4) for end, content in (("jpg", JPG), ("cls", b"1"))],
        )
    )
    at = data.index(b"1.jpg\0")
    data[at : at + 512] = b"x" * 512
    (root / "train-0.tar").write_bytes(data)


GOOD = shard(("a.jpg", JPG, "0"), ("b.jpg", JPG, "1"))
INDEXED: dict[str, tuple[Make, int, int, tuple[str, ...]]] = {
    # Maker, samples, exit code, words expected in the output or in the list of problems.
    "dots in names": (
        shard(("IMG1.jpg", JPG, "0"), ("IMG2.v2.jpg", JPG, "1"), ("v1.0/a.jpg", JPG, "2")),
        2,
        3,
        ("left out 1 sample", "IMG2.v2.jpg", "no image"),
    ),
    "webp and png beside jpg": (
        shard(("a.webp", WEBP, "0"), ("b.JPG", JPG, "1"), ("c.Png", PNG, "2")),
        3,
        0,
        (),
    ),
    "key twice": (shard(("a.jpg", JPG, "0"), ("b.jpg", PNG, "1"), ("a.jpg", WEBP, "2")), 3, 0, ()),
    "key twice, a label once": (
        members(("a.jpg", JPG), ("a.jpg", PNG), ("a.cls", b"1")),
        1,
        3,
        ("left out 1 sample", "a.jpg", "no .cls"),
    ),
    "all images before all labels": (
        members(("a.jpg", JPG), ("b.jpg", JPG), ("a.cls", b"0"), ("b.cls", b"1")),
        0,
        2,
        ("no samples of train", "no .cls or .json"),
    ),
    "half a label": (
        shard(("a.jpg", JPG, "0.5"), ("b.jpg", JPG, "1.0")),
        1,
        3,
        ("left out 1 sample", "a.jpg", "0.5"),
    ),
    "odd labels": (
        shard(
            *[
                (f"{n}.jpg", JPG, text)
                for n, text in enumerate(
                    (
                        "null",
                        "[]",
                        "nan",
                        "cat",
                        "-1",
                        "9" * 30,
                        "",
                        "[" * 5000,
                        '{"label": null}',
                        '{"label": "cat"}',
                        '{"x": 1}',
                        '{"label": 1e400}',
                        '{"label": "2"}',
                    )
                )
            ]
        ),
        1,
        3,
        ("left out 12 samples: ", "0.jpg", "11.jpg"),
    ),
    "a .cls beside a .json without label": (
        members(("a.jpg", JPG), ("a.json", b'{"w": 1}'), ("a.cls", b"3")),
        1,
        0,
        (),
    ),
    "a .CLS beside a .json with a text": (
        members(("a.jpg", JPG), ("a.JSON", b'{"label": "cat"}'), ("a.CLS", b"3\n")),
        1,
        0,
        (),
    ),
    "a .json with a label beside a text in .cls": (
        members(("a.jpg", JPG), ("a.json", b'{"label": 1}'), ("a.cls", b"cat")),
        1,
        0,
        (),
    ),
    "a mask beside": (
        members(("a.jpg", JPG), ("a.png", PNG), ("a.seg.png", PNG), ("a.cls", b"1"), ("a.txt", b"a cat")),
        1,
        0,
        (),
    ),
    "no image": (
        both(members(("a.jpg", JPG), ("a.cls", b"1"), ("b.heic", b"x"), ("b.cls", b"1"), ("README", b"x"))),
        1,
        3,
        ("left out 2 samples: ", "b.heic", "README"),
    ),
    "empty image": (shard(("a.jpg", b"", "0"), ("b.jpg", JPG, "1")), 1, 3, ("a.jpg", "empty")),
    "links": (
        members(("a.jpg", JPG), ("a.cls", b"1"), ("b.jpg", b"-> a.jpg"), ("b.cls", b"1")),
        1,
        3,
        ("b.jpg", "link"),
    ),
    "hidden": (members(("a.jpg", JPG), ("._a.jpg", b"mac"), ("a.cls", b"1")), 1, 0, ()),
    "directories, unicode, long names": (
        shard(("tr äin/", b"", "0"), (f"tr äin/{'ü' * 200}.jpg", JPG, "0"), ("🐈 1.jpeg", JPG, "1")),
        2,
        0,
        (),
    ),
    "GNU format": (shard((f"{'d/' * 80}1.jpg", JPG, "0"), form=tarfile.GNU_FORMAT), 1, 0, ()),
    "not UTF-8": (
        shard(("\udcff\udcfe.jpg", JPG, "0"), ("\udcff.jpg", JPG, "x")),
        1,
        3,
        ("left out 1 sample", "\\udcff.jpg"),
    ),
    "no recognised image": (shard(("a.heic", b"x", "0")), 0, 2, ("no samples of train", "a.heic")),
    "a tar of nothing": (members(), 0, 2, ("no samples of train",)),
    "damaged within": (damaged, 0, 2, ("train-0.tar", "damaged")),
    "cut": (
        lambda root: (root / "train-0.tar").write_bytes(tar(root / "train-0.tar", ("a.jpg", JPG * 9))[:900]),
        0,
        2,
        ("train-0.tar", "unexpected end"),
    ),
    "joined": (
        lambda root: (root / "train-0.tar").write_bytes(
            2 * tar(root / "train-0.tar", ("a.jpg", JPG), ("a.cls", b"1"))
        ),
        0,
        2,
        ("train-0.tar", "tars were joined"),
    ),
    "gzipped": (
        both(GOOD, lambda root: tar(root / "train-1.tar.gz", ("c.jpg", JPG), mode="w:gz")),
        0,
        2,
        ("train-1.tar.gz", "compressed"),
    ),
    "gzipped as .tar": (
        both(GOOD, lambda root: tar(root / "train-1.tar", ("c.jpg", JPG), mode="w:gz")),
        0,
        2,
        ("train-1.tar", "compressed"),
    ),
    "an empty shard": (
        both(GOOD, lambda root: (root / "train-1.tar").touch()),
        0,
        2,
        ("train-1.tar", "empty"),
    ),
    "a link to nothing": (
        both(GOOD, lambda root: (root / "train-1.tar").symlink_to("x")),
        0,
        2,
        ("train-1.tar", "link"),
    ),
    "a link to a shard": (
        both(shard(("a.jpg", JPG, "0")), lambda root: (root / "val-1.TAR").symlink_to("train-0.tar")),
        1,
        0,
        ("validation: 1 sample ",),
    ),
    "other files": (
        both(
            GOOD,
            lambda root: [(root / name).write_text("x") for name in ("README.md", "labels.txt", ".DS_Store")],
        ),
        2,
        0,
        ("not read", "3 (.DS_Store, README.md, labels.txt)"),
    ),
    "nested": (
        lambda root: tar(root / "deep/train-0.tar", ("a.jpg", JPG), ("a.cls", b"1")),
        0,
        2,
        ("1 (deep/)",),
    ),
    "records": (records(record(1), record(2, PNG), record(3.0), name="Train-00000-of-00001"), 3, 0, ()),
    "records with odd labels": (
        records(
            record(1),
            record(0.5),
            record(None),
            record(b"cat"),
            record(1, None),
            record(1, b""),
            record(-1),
            tfrecord.framed(b"no example"),
        ),
        1,
        3,
        ("left out 1 sample", "no label", "0.5", "not contain a tf.train.Example"),
    ),
    "records of something else": (records(record(1, None)), 0, 2, ("train.tfrecord", "no image", "label")),
    "a wrong checksum": (
        records(record(1), record(2)[:-1] + b"x"),
        0,
        2,
        ("train.tfrecord", "wrong checksum"),
    ),
    "cut records": (records(record(1), record(2)[:-9]), 0, 2, ("train.tfrecord", "ends within record 2")),
    "gzipped records": (
        both(
            records(record(1)), lambda root: (root / "train-1.tfrecord").write_bytes(gzip.compress(record(2)))
        ),
        0,
        2,
        ("train-1.tfrecord", "compressed"),
    ),
    "upper-case splits": (
        both(records(record(1)), records(record(1), name="VAL-0.tfrecord")),
        1,
        0,
        ("validation: 1 sample ",),
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_index(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, samples, code, words = INDEXED[name]
    make(tmp_path)
    assert main(["index", str(tmp_path)]) == code
    output = "".join(capfd.readouterr())
    assert "Traceback" not in output
    listed = tmp_path / "train.problems.tsv"
    output += listed.read_text() if listed.exists() else ""
    assert not [word for word in words if word not in output], output
    assert (tmp_path / "train.json").exists() == (code != 2)
    if code == 2:
        return
    data = Dataset.open(tmp_path)
    assert len(data) == samples, output
    assert all(data.read(number) in (JPG, PNG, WEBP) for number in range(samples))
    if name == "key twice":
        assert [(data.read(n), int(data.rows["label"][n])) for n in range(3)] == [
            (JPG, 0),
            (PNG, 1),
            (WEBP, 2),
        ]
    assert main(["verify", str(tmp_path), "--decode"]) == 0
    assert main(["index", str(tmp_path)]) == code, "indexing again gives another exit code"


def test_index_of_files_in_directories(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "Val"):
        tar(tmp_path / split / "0.tar", ("a.jpg", JPG), ("a.cls", b"1"))
    assert main(["index", str(tmp_path), "--files", "*/*.tar"]) == 0
    assert Dataset.open(tmp_path, "validation").read(0) == JPG
    assert main(["index", str(tmp_path), "--files", "/*.tar"]) == 2
    assert "Use a pattern that is relative to" in capfd.readouterr().err


def images(*names: str) -> Make:
    def make(root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            kind = {".png": "PNG", ".webp": "WEBP"}.get(Path(name).suffix.lower(), "JPEG")
            (root / name).write_bytes(image(len(name), kind))

    return make


def two(first: str, second: str) -> Make:
    return images(
        *(f"{split}/{kind}/{n}.jpg" for split in (first, second) for kind in ("cat", "dog") for n in "12")
    )


PREPARED: dict[str, tuple[Make, dict[str, int] | None, tuple[str, ...]]] = {
    "Train and Val": (two("Train", "Val"), {"train": 4, "validation": 4}, ()),
    "train and valid": (two("train", "valid"), {"train": 4, "validation": 4}, ()),
    "training and validation": (two("training", "VALIDATION"), {"train": 4, "validation": 4}, ()),
    "Training and Testing": (two("Training", "Testing"), {"train": 4}, ("not read", "1 (Testing)")),
    "unknown splits": (two("trn", "vld"), None, ("Are they splits?", "trn, vld", "cat, dog")),
    "a directory around": (images("pets/cat/1.jpg", "pets/dog/1.jpg"), None, ("pets", "cat, dog", "as SRC")),
    "val and valid": (
        both(two("train", "val"), two("Valid", "train")),
        None,
        ("Valid and val", "validation"),
    ),
    "classes called train and valid": (images("train/1.jpg", "bus/1.jpg", "valid/1.jpg"), {"train": 3}, ()),
    "names": (
        images("ca t.v2/1.JPG", "ca t.v2/ä.x.jpeg", "dög/1.Png", "dög/sub/2.webp", "dög/3.jfif"),
        {"train": 5},
        (),
    ),
    "other files": (
        both(
            images("cat/1.jpg", "cat/2.jpg.bak", "cat/3.HEIC", "cat/.4.jpg", "cat/noending", "cat/.x/5.jpg"),
            lambda root: (root / "notes.txt").touch(),
        ),
        {"train": 1},
        ("left out", "2.jpg.bak", "3.HEIC", ".4.jpg", "noending", "notes.txt", "hidden: 2"),
    ),
    "images in one more directory": (images("cat/images/1.jpg", "dog/images/1.jpg"), {"train": 2}, ()),
    "links": (
        both(images("cat/1.jpg", "dog/1.jpg"), lambda root: (root / "cat/2.jpg").symlink_to("1.jpg")),
        {"train": 3},
        (),
    ),
    "an empty class": (
        both(images("cat/1.jpg"), lambda root: (root / "dog").mkdir()),
        None,
        ("without images: dog",),
    ),
    "a tar with a link": (
        both(
            images("dog/1.jpg"),
            lambda root: tar(root / "cat.tar", ("1.jpg", JPG), ("2.jpg", b"-> 1.jpg"), ("x.txt", b"x")),
        ),
        {"train": 2},
        ("links: 1 (2.jpg)", "x.txt"),
    ),
    "a damaged tar": (
        both(
            images("dog/1.jpg"),
            lambda root: (root / "cat.tar").write_bytes(tar(root / "cat.tar", ("1.jpg", JPG)) + b"x" * 512),
        ),
        None,
        ("cat.tar", "damaged"),
    ),
    "test beside": (
        both(two("train", "val"), images("test/1.jpg", "docs/a.png")),
        {"train": 4, "validation": 4},
        ("2 (docs, test)",),
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_images(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, splits, words = PREPARED[name]
    make(tmp_path / "src")
    code = main(["prepare", "imagenet", str(tmp_path / "src"), str(tmp_path / "dst"), "-np", "1"])
    output = "".join(capfd.readouterr())
    assert code == (2 if splits is None else 0), output
    assert "Traceback" not in output
    assert not [word for word in words if word not in output], output
    split_sizes = {
        path.stem: len(Dataset.open(tmp_path / "dst", path.stem))
        for path in (tmp_path / "dst").glob("*.json")
    }
    assert split_sizes == (splits or {})


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    [part] = planted(70, seed=3)
    return criteo_lines(part, "\t").splitlines(keepends=True)


NAMES = "\t".join(COLUMNS).encode() + b"\n"


def parquet(data: bytes, upside_down: bool = True) -> bytes:
    csv, made = pytest.importorskip("pyarrow.csv"), io.BytesIO()
    table = csv.read_csv(io.BytesIO(NAMES + data), parse_options=csv.ParseOptions(delimiter="\t"))
    table = table.select(table.column_names[::-1] if upside_down else table.column_names[1:])
    pytest.importorskip("pyarrow.parquet").write_table(table, made)
    return made.getvalue()


CLICKS: Mapping[str, Callable[[bytes], bytes]] = {
    "day_0.csv": lambda data: data.replace(b"\t", b","),
    "day_1.csv.zst": lambda data: arrow.compress(NAMES + data, "zstd", asbytes=True),
    "day_2.csv.bz2": bz2.compress,
    "day_3.CSV": lambda data: NAMES + data,
    "day_4.parquet": parquet,
    "Day 5.tsv.XZ": lzma.compress,
    "däy.6.TXT.Gz": lambda data: gzip.compress(data.replace(b"\n", b"\r\n")),
    "day_7": lambda data: b"\xef\xbb\xbf" + NAMES + data,
    "day_8²": lambda data: b"\xef\xbb\xbf" + data.rstrip(b"\n"),
    "day_9.Tsv": lambda data: NAMES.upper().replace(b"\n", b"\r\n") + data,
}


def test_click_logs_of_all_kinds(
    lines: list[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    for number, (name, made) in enumerate(CLICKS.items()):
        (source / name).write_bytes(made(b"".join(lines[7 * number : 7 * number + 7])))
    others = (".x.csv", "Test.csv", "day.zip", "readme.txt")
    for name in others:
        (source / name).write_bytes(b"x")
    assert main(["prepare", "criteo", str(source), str(tmp_path / "dst"), "-np", "1"]) == 0
    assert f"not read, because of their names: 5 ({', '.join([*others, 'sub'])})" in capfd.readouterr().err
    (tmp_path / "all").write_bytes(b"".join(lines))
    expected, prepared = Table.open(tmp_path / "all", table_size=1_000_000), Table.open(tmp_path / "dst")
    rows = [sorted(row.tobytes() for row in t.read(np.arange(70)).packed()) for t in (expected, prepared)]
    assert len(prepared) == len(expected)
    assert rows[0] == rows[1]


BROKEN: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "a.parquet": (lambda data: parquet(data, upside_down=False), "label"),
    "b.parquet": (lambda data: parquet(data)[:-30], "damaged"),
    "c.csv.zst": (lambda data: arrow.compress(data, "zstd", asbytes=True)[:-9], "or incomplete"),
    "d.csv.bz2": (lambda data: bz2.compress(data)[:-9], "or incomplete"),
    "e.csv.xz": (lambda data: b"no xz", "or incomplete"),
    "f.csv": (lambda data: b"id,clicked\n1,0\n", "expected label,I1"),
    "g.csv": (lambda data: data.replace(b"\t", b",", 1).replace(b"\t", b" "), "rows are broken"),
    "h.csv": (lambda data: NAMES, "it is empty"),
    "i.tsv": (
        lambda data: b"".join(line.rpartition(b"\t")[0] + b"\n" for line in data.splitlines()),
        "are broken",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_click_logs_that_cannot_be_read(
    name: str, lines: list[bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, word = BROKEN[name]
    (tmp_path / "src").mkdir()
    (tmp_path / "src/day_0").write_bytes(b"".join(lines))
    (tmp_path / "src" / name).write_bytes(made(b"".join(lines)))
    assert main(["prepare", "criteo", str(tmp_path / "src"), str(tmp_path / "dst"), "-np", "1"]) == 2
    output = "".join(capfd.readouterr())
    assert "Traceback" not in output
    assert f"{name}: " in output or f"{name} is" in output
    assert word in output
