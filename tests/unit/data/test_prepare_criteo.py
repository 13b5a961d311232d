"""`ringdance data prepare criteo` in this process: sources, order, balance, broken rows."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import criteo_lines
from sampled import drawn

from ringdance.data import Table, planted
from ringdance.data.prepare import criteo, shuffle
from ringdance.data.prepare.chunks import SourceFile
from ringdance.data.prepare.cli import main
from ringdance.data.prepare.shuffle import ShufflePlan, divide
from ringdance.data.tables.criteo import COLUMNS
from ringdance.data.tables.rows import dtype

pytest.importorskip("pyarrow")
ROWS = 9000  # of two files of about 1 MB each


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    (part,) = planted(ROWS, seed=5)
    return criteo_lines(part, "\t").splitlines(keepends=True)


@pytest.fixture(scope="module")
def source(lines, tmp_path_factory) -> Path:
    """Files of Criteo's click logs by day: day_10 comes after day_2."""
    root = tmp_path_factory.mktemp("days")
    (root / "day_2").write_bytes(b"".join(lines[:5000]))
    (root / "day_10").write_bytes(b"".join(lines[5000:]))
    (root / "test.txt").write_bytes(b"no labels\n")
    return root


def prepare(*words: object) -> int:
    return main([str(word) for word in ("prepare", "criteo", *words, "-np", 1)])


def rows(directory: Path, split: str = "train") -> list[bytes]:
    table = Table.open(directory, split)
    return [row.tobytes() for row in table.read(np.arange(len(table))).packed()]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory) -> Path:
    destination = tmp_path_factory.mktemp("prepared")
    words = (source, destination, "--shards", 4, "--validation", 0.1, "--balance", "--chunk", 1)
    assert prepare(*words, "--table-size", 5000) == 0
    return destination


def test_all_rows_are_there_once_in_another_order(source, prepared):
    first, second = (Table.open(source / day, table_size=5000, format="csv") for day in ("day_2", "day_10"))
    there = [row.tobytes() for one in (first, second) for row in one.read(np.arange(len(one))).packed()]
    assert Table.open(prepared).only_label() is None
    train, validation = rows(prepared), rows(prepared, "validation")
    assert sorted(train + validation) == sorted(there)
    assert abs(len(validation) - ROWS / 10) < 2
    where = np.array([there.index(row) for row in train[:400]])  # of the first file
    assert abs((where < 5000).mean() - 5 / 9) < 0.1
    assert (np.abs(np.diff(where)) > 50).mean() > 0.9


@pytest.mark.parametrize("label", [b"0", b"1"])
def test_labels_of_one_class_are_a_warning(lines, tmp_path, capsys, label):
    (tmp_path / "day").write_bytes(b"".join(label + one[1:] for one in lines[:300]))
    assert prepare(tmp_path / "day", tmp_path / "set", "--validation", 0.1) == 0
    shown = capsys.readouterr()
    for split in ("train", "validation"):
        assert f"warning: {split}: all labels are {label.decode()}" in shown.out + shown.err
    assert Table.open(tmp_path / "set").only_label() == float(label)


def test_balance(prepared):
    for split in ("train", "validation"):
        files = [np.load(path) for path in sorted(prepared.glob(f"{split}-*.npy"))]
        assert len(files) == {"train": 4, "validation": 1}[split]
        clicks = [int(one["label"].sum()) for one in files]
        assert max(clicks) - min(clicks) <= 1
        assert max(map(len, files)) - min(map(len, files)) <= 2


@pytest.mark.parametrize("format", ["tfrecord", "libsvm"])
def test_formats_of_source_and_result(source, prepared, tmp_path, format):
    words = ("--shards", 4, "--validation", 0.1, "--balance", "--chunk", 1, "--table-size", 5000)
    assert prepare(source, tmp_path / "one", *words, "--format", format) == 0
    for split in ("train", "validation"):
        assert rows(tmp_path / "one", split) == rows(prepared, split)  # in the same order
    assert prepare(tmp_path / "one", tmp_path / "two", "--chunk", 1, "--table-size", 5000) == 0
    for split in ("train", "validation"):
        assert sorted(rows(tmp_path / "two", split)) == sorted(rows(prepared, split))


def test_compressed_files_are_read_in_the_same_chunks(source, prepared, tmp_path):
    for name in ("day_2", "day_10"):
        with gzip.open(tmp_path / f"{name}.gz", "wb", compresslevel=1) as file:
            file.write((source / name).read_bytes())
    words = ("--shards", 4, "--validation", 0.1, "--balance", "--chunk", 1, "--table-size", 5000)
    assert prepare(tmp_path / "day_2.gz", tmp_path / "day_10.gz", tmp_path / "out", *words) == 0
    assert contents(tmp_path / "out") == contents(prepared)


def test_validation_of_its_own(source, tmp_path, lines):
    assert prepare(source / "day_2", tmp_path, "--validation", source / "day_10") == 0
    assert (len(rows(tmp_path)), len(rows(tmp_path, "validation"))) == (5000, len(lines) - 5000)


def test_broken_lines(tmp_path, lines, capsys):
    broken = list(lines[:300])
    broken[100] = b"0\tonly\n"
    broken[200] = broken[200].replace(b"\t", b"\tx", 1)
    broken[299] = b"7" + broken[299].rstrip(b"\n")[1:]  # the last one has no end
    path = tmp_path / "train.txt"
    path.write_bytes(b"".join(broken))
    words = (path, tmp_path / "out")
    assert prepare(*words, "--max-broken", 2) == 2
    error = capsys.readouterr().err
    assert "more than --max-broken 2" in error or "--max-broken" in error
    assert prepare(*words, "--max-broken", 3) == 3
    assert prepare(*words, "--max-broken", 3) == 3, "complete since an earlier run"
    assert len(rows(tmp_path / "out")) == 297
    listed = (tmp_path / "out/problems.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in listed] == [[str(path), n] for n in ("101", "201", "300")]
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join(lines[n] for n in range(300) if n not in (100, 200, 299)))
    kept = Table.open(whole, table_size=1_000_000).read(np.arange(297)).packed()
    assert sorted(rows(tmp_path / "out")) == sorted(row.tobytes() for row in kept)


def test_errors(source, prepared, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("three little words\n")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/train.json").write_bytes((prepared / "train.json").read_bytes()[:-9])
    for words, part in (
        ((tmp_path / "none", tmp_path / "out"), "no such file"),
        ((tmp_path / "empty", tmp_path / "out"), "no click logs"),
        ((tmp_path / "text.txt", tmp_path / "out"), "text.txt"),
        ((source, prepared, "--shards", 3), "--shards 3 instead of 4"),
        ((prepared, tmp_path / "out", "--table-size", 100), "beyond the table"),
        ((source, tmp_path / "out", "--validation", "1.5"), "less than 1"),
        ((tmp_path / "cut", tmp_path / "out"), "cut/train.json is damaged"),
    ):
        assert prepare(*words) == 2
        assert part in capsys.readouterr().err


def test_what_would_be_lost_or_taken_twice_is_refused(source, tmp_path, capsys, lines):
    logs, out = tmp_path / "logs", tmp_path / "out"
    shutil.copytree(source, logs)

    def refused(*words: object) -> str:
        assert prepare(*words) == 2
        assert not list(out.glob("**/unit.*"))
        return capsys.readouterr().err

    day, packed = logs / "day_11", gzip.compress(b"".join(lines[:900]))
    day.with_suffix(".gz").write_bytes(packed)
    day.write_bytes(b"".join(lines[:900]))
    assert f"{day}.gz has the rows of {day}, which would be taken twice" in refused(logs, out)
    assert f"{logs}/day_2 has the rows of {logs}/day_2" in refused(logs / "day_2", logs / "day_2", out)
    day.unlink()
    assert f"{logs}/day_2 has the rows of {logs}/day_2" in refused(logs, out, "--validation", logs / "day_2")
    day.with_suffix(".gz").unlink()
    day.symlink_to("day_2")
    assert "day_11 has the rows of" in refused(logs, out)
    day.unlink()
    for make, part in (
        (lambda: day.symlink_to("nowhere"), "day_11 is a link to nothing, or no regular file"),
        (lambda: os.mkfifo(day), "day_11 is a link to nothing, or no regular file"),
    ):
        make()
        assert part in refused(logs, out)
        day.unlink()
    empty = tmp_path / "empty"
    empty.touch()
    assert "empty: no rows of click logs at its beginning: it is empty" in refused(empty, out)
    for number, data in enumerate((packed[:5], packed[:-9], b"no gzip", packed[:-9] + b"x" * 9)):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(data)
        assert f"{path} is damaged, or not complete: " in refused(path, out)
    path.write_bytes(packed[:2000] + bytes(100) + packed[2100:])
    assert f"{path} is damaged, or not complete: " in refused(path, out)


def test_empty_files_of_a_directory_are_named_and_left_out(source, tmp_path, capsys):
    """As Spark writes them."""
    logs = tmp_path / "logs"
    shutil.copytree(source, logs)
    for name in ("_SUCCESS", "part-7"):
        (logs / name).touch()
    assert prepare(logs, tmp_path / "out") == 0
    assert "left out, as they are empty: _SUCCESS, part-7" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["csv", "rows", "tfrecord"])
def test_a_source_that_changes_meanwhile_is_refused(source, prepared, tmp_path, monkeypatch, capsys, format):
    """While a chunk is parsed it grows by a row, or half of it is cut."""
    if format == "tfrecord":
        assert prepare(prepared, tmp_path / "made", "--format", format) == 0
    of_format = {"csv": source / "day_2", "rows": prepared / "train-00000-of-00004.npy"}
    given = of_format.get(format) or next((tmp_path / "made").glob("train*.tfrecord"))
    parse = shuffle.parse
    for number, change in enumerate((lambda size: size + 1, lambda size: size // 2)):
        path, out = tmp_path / f"{number}{given.suffix}", tmp_path / f"out.{number}"
        shutil.copy(given, path)

        def changing(*words, path=path, change=change):
            os.truncate(path, change(given.stat().st_size))
            return parse(*words)

        monkeypatch.setattr(shuffle, "parse", changing)
        assert prepare(path, out, "--chunk", 0.2) == 2
        assert f"{path} has changed meanwhile" in capsys.readouterr().err
        assert not list(out.glob(".prepare/unit.*" if format != "csv" else ".prepare/unit.0.0.*"))


@pytest.mark.parametrize("format", ["rows", "libsvm"])
def test_a_damaged_file_of_a_prepared_source_is_named(source, tmp_path, capsys, format):
    made = tmp_path / "made"
    assert prepare(source / "day_10", made, "--format", format, "--shards", 2) == 0
    path = sorted(made.glob("train-00001*"))[0]
    data = path.read_bytes()
    path.write_bytes(data[:-300])
    assert prepare(made, tmp_path / "out") == 2
    assert f"{path} is damaged: it has {len(data) - 300} bytes" in capsys.readouterr().err
    path.write_bytes(data.replace(b"4", b"5", 1) if format == "libsvm" else data[:-1] + bytes([data[-1] ^ 1]))
    assert prepare(made, tmp_path / "out") == 2
    assert f"{path} is damaged: its checksum is not that of the index" in capsys.readouterr().err


LEFT = (
    "unit.0.*.json", "sorted.*.rows.npy", "merge.json", "merged.*.json", "merged.*.rows.npy",
    "train-*.libsvm.json", "train-*.offsets.npy",
)  # fmt: skip
DAMAGES = [(name, damage) for name in LEFT for damage in ("cut", "flip", "empty")]


@pytest.mark.parametrize("count", [3, pytest.param(len(DAMAGES), marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", [1000, 3])
def test_what_an_interrupted_run_has_left_damaged_is_done_again(
    source, tmp_path, monkeypatch, capsys, most, count
):
    """In both passes and between: notes, offsets, what is sorted or merged."""
    monkeypatch.setattr(shuffle, "MOST_RUNS", most)
    monkeypatch.setattr(shuffle, "MERGED", 2)
    words = ("--shards", 3, "--format", "libsvm", "--chunk", 0.2)
    whole, out, gather, found = tmp_path / "whole", tmp_path / "out", shuffle.gather, []
    assert prepare(source / "day_10", whole, *words) == 0
    own = out / ".prepare"

    def interrupted() -> None:
        left = iter((1, 0))  # the second file of pass 2 is the last
        with monkeypatch.context() as patch:
            patch.setattr(shuffle, "gather", lambda *words: gather(*words) or 1 // next(left))
            with pytest.raises(ZeroDivisionError):
                prepare(source / "day_10", out, *words, "--overwrite")

    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)

    def flip(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    def empty(path: Path) -> None:
        path.write_bytes(b"")

    by_name = {"cut": cut, "flip": flip, "empty": empty}
    due = drawn(f"damaged {most}", DAMAGES, count)
    for name, damage in dict.fromkeys([("merged.*.rows.npy", "flip"), *due]):
        interrupted()
        paths = [path for path in own.glob(name) if damage != "flip" or path.suffix == ".npy"]
        found += [path.name for path in paths]
        for path in paths[:1]:
            by_name[damage](path)
        code = prepare(source / "day_10", out, *words)
        if code:
            assert f"{own}/merged.0." in (error := capsys.readouterr().err)
            assert "npy are damaged: the same command makes them again" in error
            assert prepare(source / "day_10", out, *words) == 0
        assert contents(out) == contents(whole), (name, damage)
    assert any(name.startswith("merged") for name in found) == (most == 3)
    interrupted()
    cut(own / "criteo.json")
    assert prepare(source / "day_10", out, *words) == 2
    assert f"{own}/criteo.json is damaged. Begin anew with --overwrite" in capsys.readouterr().err
    assert prepare(source / "day_10", out, *words, "--overwrite") == 0
    cut(out / "train-00001-of-00003.libsvm")
    assert prepare(source / "day_10", out, *words) == 2
    assert "train-00001-of-00003.libsvm is damaged: it has " in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_told_before_the_work(source, tmp_path, lines, monkeypatch, capsys):
    path = tmp_path / "day_2.gz"
    path.write_bytes(gzip.compress((",".join(COLUMNS) + "\n").encode() + b"".join(lines[:5000]), 1))
    needed = 5000 * (8 + 2 * dtype(39).itemsize)
    for given in (source / "day_2", path):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": needed * 0.9}))
            assert prepare(given, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert "about 3.2 MB to write, half of it for the time of sorting, but only 2.9 MB free" in error
        assert "Pass 1" not in error


def test_files_of_others_are_never_removed(prepared, tmp_path, capsys):
    """Named as those of a data set, but by no index or list of outputs; nor what is read."""
    own = tmp_path / "own"
    assert prepare(prepared, own, "--shards", 2, "--format", "tfrecord") == 0
    before = contents(own)
    for words in ((own, own), (own / "train-00000-of-00002.tfrecord", tmp_path)):
        assert prepare(*words, "--overwrite") == 2
        assert "is within" in capsys.readouterr().err
    for name in ("train.json", "train.npy", "validation.json", "validation.npy", ".prepare/outputs.json"):
        (own / name).unlink()
    (own / ".prepare/criteo.json").unlink()
    for words in ((), ("--overwrite",)):
        assert main(["generate", "criteo", str(own), "--rows", "100", *words]) == 2
        assert "train-00000-of-00002.tfrecord (3 such files), which no index" in capsys.readouterr().err
        assert prepare(prepared, own, *words) == 2
        assert "which no index" in capsys.readouterr().err
    assert contents(own).items() <= before.items()
    assert len(contents(own)) == 3


def test_pass_2_holds_a_file_in_memory_once(tmp_path):
    names, each = ["a", "b", "c"], 5000
    for number, name in enumerate(names):
        np.save(tmp_path / f"{name}.keys.npy", np.arange(each, dtype=np.uint64) * 3 + number)
        np.save(tmp_path / f"{name}.rows.npy", np.full(each, number, dtype(39)))
    begins, ends = np.array([[0, 10, 0]]), np.array([[each, each, 0]])
    tracemalloc.start()
    try:
        keys, rows = shuffle._between(tmp_path, names, begins, ends)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * (keys.nbytes + rows.nbytes)
    finally:
        tracemalloc.stop()
    assert keys.tolist() == [*range(0, 3 * each, 3), *range(31, 3 * each, 3)]
    assert rows["label"].tolist() == [0] * each + [1] * (each - 10)


@pytest.mark.parametrize("damage", [b"", b"[3]", None])
def test_what_an_interrupted_run_or_a_damaged_index_names_is_removed(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    words = ["generate", "criteo", ".", "--rows", "100", "--overwrite"]
    assert main([*words, "--shards", "3"]) == 0
    if damage is None:
        (tmp_path / "train.json").unlink()
    else:
        (tmp_path / "train.json").write_bytes(damage)
    assert main([*words, "--shards", "1"]) == 0
    assert [path.name for path in tmp_path.glob("train-*")] == ["train-00000-of-00001.npy"]
    monkeypatch.chdir(tmp_path.parent)
    words[2] = tmp_path.name
    assert main([*words, "--validation", "0.5"]) == main(words) == 0
    assert not list(tmp_path.glob("validation*"))


def test_a_validation_that_is_nothing_says_what_it_may_be(capsys):
    assert main(["prepare", "criteo", "a", "b", "--validation", "nowhere"]) == 2
    assert "--validation: nowhere: give a file, a directory or a share" in capsys.readouterr().err


def test_broken_rows_are_listed_in_time_linear_in_the_files(tmp_path, monkeypatch):
    file = SourceFile("x", 0, "rows", 39, 0, 1, 0)
    plan = ShufflePlan([file] * 50, "rows", 0, 1000, False, 0.0, None, 1 << 20)
    shuffle.state(tmp_path).mkdir()
    for _, _, note in plan.units():
        (shuffle.state(tmp_path) / note).write_text("[]")
    calls = []
    monkeypatch.setattr(SourceFile, "units", lambda *_: calls.append(1) or [-1])
    assert criteo._runs(tmp_path, plan) == ([[], []], 0)
    assert len(calls) == 50


def test_info_and_verify(source, tmp_path, capsys):
    assert prepare(source, tmp_path, "--shards", 2, "--format", "libsvm") == 0
    assert main(["info", str(tmp_path)]) == 0
    assert "9000" in capsys.readouterr().out
    assert main(["info", str(tmp_path), "--json"]) == 0
    (about,) = json.loads(capsys.readouterr().out)
    assert (about["rows"], about["fields"], about["files"]) == (ROWS, 39, 2)
    assert 0.2 < about["clicks"] < 0.3
    assert main(["verify", str(tmp_path), "--decode"]) == 0
    assert "checksums and rows of 9000 rows in 2 files" in capsys.readouterr().out
    path = tmp_path / "train-00001-of-00002.libsvm"
    data = path.read_bytes()
    path.write_bytes(data.replace(b":", b";", 1))
    assert main(["verify", str(tmp_path), "--decode"]) == 1
    out = capsys.readouterr().out
    assert "checksum" in out
    assert f"{path}, line 1: " in out


def test_real_rows(tmp_path):
    path = Path(__file__).parents[4] / "shared/data/ctr/criteo_sample.csv"
    if not path.exists():
        pytest.skip("needs the sample of Criteo's rows")
    assert prepare(path, tmp_path, "--balance", "--shards", 3) == 0
    assert len(rows(tmp_path)) == 200
    sizes = [one["rows"] for one in json.loads((tmp_path / "train.json").read_text())["files"]]
    assert (sum(sizes), max(sizes) - min(sizes) <= 2) == (200, True)


def test_cuts_between_any_ranks():
    random = np.random.RandomState(0)
    keys = [np.sort(random.randint(0, 2**63, n).astype(np.uint64) * np.uint64(2)) for n in (0, 1, 50, 400)]
    cuts = divide(lambda: keys, np.array([0, 1, 77, 451]))
    assert cuts.sum(axis=1).tolist() == [0, 1, 77, 451]
    joined = np.sort(np.concatenate(keys))
    for rank, cut in zip((0, 1, 77, 451), cuts, strict=True):
        before = np.concatenate([one[:at] for one, at in zip(keys, cut, strict=True)])
        assert (np.sort(before) == joined[:rank]).all()


@pytest.mark.parametrize("near", [0, 60])
def test_cuts_of_keys_that_share_their_first_bits(near, monkeypatch):
    """However few or many keys a bucket has, as many as wanted are before a cut."""
    monkeypatch.setattr(shuffle, "_NEAR", near)
    keys = [np.arange(n, 3000, 7, dtype=np.uint64) for n in range(7)]
    ranks = np.array([0, 1, 2, 1500, 2999, 3000])
    assert divide(lambda: keys, ranks).sum(axis=1).tolist() == ranks.tolist()


def test_merged_runs_give_the_same_bytes(source, tmp_path, monkeypatch):
    """With two groups of runs, one of them merged, and what an interrupted run has merged already."""
    words = ("--shards", 3, "--balance", "--chunk", 0.02, "--table-size", 5000, "--validation")
    assert prepare(source / "day_10", tmp_path / "whole", *words, source / "day_2") == 0
    monkeypatch.setattr(shuffle, "MOST_RUNS", 50)
    monkeypatch.setattr(shuffle, "MERGED", 9)
    monkeypatch.setattr(shuffle, "_PIECE", 300)
    gather = shuffle.gather
    monkeypatch.setattr(shuffle, "gather", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(source / "day_10", tmp_path / "merged", *words, source / "day_2")
    left = [path.name.split(".")[:2] for path in (tmp_path / "merged/.prepare").glob("*.rows.npy")]
    assert left.count(["merged", "1"]) == 7
    assert left.count(["sorted", "0"]) == 47
    assert len(left) == 54, "runs that were merged are removed"
    monkeypatch.setattr(shuffle, "gather", gather)
    monkeypatch.setattr(shuffle, "merge", lambda *_: 1 / 0)  # nothing is merged again
    assert prepare(source / "day_10", tmp_path / "merged", *words, source / "day_2") == 0
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


MEASURED = """
import resource, sys
from ringdance.data.prepare import shuffle
from ringdance.data.prepare.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
shuffle.MOST_RUNS = int(sys.argv[2])
code = main(["prepare", "criteo", *sys.argv[3:]])
print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
sys.exit(code)
"""


@pytest.mark.parametrize(("runs", "most", "limit", "processes"), [
    (150, 100, 64, 1),
    pytest.param(20_000, shuffle.MOST_RUNS, 1024, 2, marks=[pytest.mark.slow, pytest.mark.limit(1800)]),
])  # fmt: skip
def test_many_runs_need_few_open_files_and_little_memory(tmp_path, runs, most, limit, processes):
    """Each row is there once; every run has some rows for every file."""
    source, chunk, count = tmp_path / "train.txt", 2048, 0
    with open(source, "wb") as file:
        for part in planted(runs * 10, seed=5):
            for line in criteo_lines(part, "\t").splitlines(keepends=True):
                if file.tell() < runs * chunk:
                    file.write(line)
                    count += 1
    words = [source, tmp_path / "out", "--shards", 16, "--chunk", chunk / (1 << 20), "-np", processes]
    command = [sys.executable, "-c", MEASURED, *map(str, [limit, most, *words])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"Between the passes: merge {runs} runs into {-(-runs // shuffle.MERGED)}" in done.stderr
    assert int(done.stdout.split()[-1]) < 1 << 20, "1 GB, in kB"
    table = Table.open(source, table_size=1_000_000, format="csv")
    there = table.read(np.arange(len(table))).packed()
    found = Table.open(tmp_path / "out").read(np.arange(count)).packed()
    assert len(found) == len(there) == count
    assert sorted(row.tobytes() for row in found) == sorted(row.tobytes() for row in there)
