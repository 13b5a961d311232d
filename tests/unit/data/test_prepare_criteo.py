"""`ringdance data prepare criteo` in this process: sources, order and broken rows."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import criteo_lines

from ringdance.data import Table, planted
from ringdance.data.prepare import criteo, shuffle
from ringdance.data.tables.criteo import mixed
from ringdance.tools.data import main

pytest.importorskip("pyarrow")
ROWS = 9000  # two files of about 1 MB each


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    (part,) = planted(ROWS, seed=5)
    return criteo_lines(part, "\t").splitlines(keepends=True)


@pytest.fixture(scope="module")
def source(lines, tmp_path_factory) -> Path:
    """Write Criteo's click logs in one file per day. The file day_10 comes after day_2."""
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
    words = (source, destination, "--shards", 4, "--validation", 0.1, "--chunk", 1)
    assert prepare(*words, "--table-size", 5000) == 0
    return destination


def test_all_rows_are_there_once_in_another_order(source, prepared):
    first, second = (Table.open(source / day, table_size=5000, format="csv") for day in ("day_2", "day_10"))
    there = [row.tobytes() for table in (first, second) for row in table.read(np.arange(len(table))).packed()]
    assert Table.open(prepared).only_label() is None
    train, validation = rows(prepared), rows(prepared, "validation")
    assert sorted(train + validation) == sorted(there)
    assert abs(len(validation) - ROWS / 10) < 120  # chosen by a hash
    where = np.array([there.index(row) for row in train[:400]])  # rows of the first file
    assert abs((where < 5000).mean() - 5 / 9) < 0.1
    assert (np.abs(np.diff(where)) > 50).mean() > 0.9


@pytest.mark.parametrize("label", [b"0", b"1"])
def test_labels_of_one_class_are_a_warning(lines, tmp_path, capsys, label):
    (tmp_path / "day").write_bytes(b"".join(label + line[1:] for line in lines[:300]))
    assert prepare(tmp_path / "day", tmp_path / "set", "--validation", 0.1) == 0
    shown = capsys.readouterr()
    for split in ("train", "validation"):
        assert f"warning: {split}: all labels are {label.decode()}" in shown.out + shown.err
    assert Table.open(tmp_path / "set").only_label() == float(label)


def test_formats_of_source_and_result(source, prepared, tmp_path):
    words = ("--shards", 4, "--validation", 0.1, "--chunk", 1, "--table-size", 5000)
    assert prepare(source, tmp_path / "one", *words, "--format", "tfrecord") == 0
    for split in ("train", "validation"):
        assert rows(tmp_path / "one", split) == rows(prepared, split)  # in the same order
    assert prepare(tmp_path / "one", tmp_path / "two", "--chunk", 1, "--table-size", 5000) == 0
    for split in ("train", "validation"):
        assert sorted(rows(tmp_path / "two", split)) == sorted(rows(prepared, split))


def test_compressed_files_are_read_in_the_same_chunks(source, prepared, tmp_path):
    for name in ("day_2", "day_10"):
        with gzip.open(tmp_path / f"{name}.gz", "wb", compresslevel=1) as file:
            file.write((source / name).read_bytes())
    words = ("--shards", 4, "--validation", 0.1, "--chunk", 1, "--table-size", 5000)
    assert prepare(tmp_path / "day_2.gz", tmp_path / "day_10.gz", tmp_path / "out", *words) == 0
    assert contents(tmp_path / "out") == contents(prepared)


def test_validation_of_its_own(source, tmp_path, lines):
    assert prepare(source / "day_2", tmp_path, "--validation", source / "day_10") == 0
    assert (len(rows(tmp_path)), len(rows(tmp_path, "validation"))) == (5000, len(lines) - 5000)


def test_broken_lines(tmp_path, lines, capsys):
    broken = list(lines[:300])
    broken[100] = b"0\tonly\n"
    broken[200] = broken[200].replace(b"\t", b"\tx", 1)
    broken[299] = b"7" + broken[299].rstrip(b"\n")[1:]  # the last line has no newline
    path = tmp_path / "train.txt"
    path.write_bytes(b"".join(broken))
    words = (path, tmp_path / "out")
    assert prepare(*words, "--max-broken", 2) == 2
    error = capsys.readouterr().err
    assert "more than --max-broken 2" in error or "--max-broken" in error
    assert prepare(*words, "--max-broken", 3) == 3
    assert prepare(*words, "--max-broken", 3) == 3, "already complete"
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
    same = ("--validation", 0.1, "--chunk", 1, "--table-size", 5000)
    for words, part in (
        ((tmp_path / "none", tmp_path / "out"), "no such file"),
        ((tmp_path / "empty", tmp_path / "out"), "no click logs"),
        ((tmp_path / "text.txt", tmp_path / "out"), "text.txt"),
        ((source, prepared, "--shards", 3), "--validation none instead of 0.1"),
        ((source, prepared, "--shards", 3, *same), "Now: 4 instead of 5 files (--shards)"),
        ((prepared, tmp_path / "out", "--table-size", 100), "is out of range: expected"),
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
    assert f"{day}.gz has the same rows as {day}." in refused(logs, out)
    assert f"{logs}/day_2 has the same rows as {logs}/day_2" in refused(logs / "day_2", logs / "day_2", out)
    day.unlink()
    assert f"{logs}/day_2 has the same rows as {logs}" in refused(logs, out, "--validation", logs / "day_2")
    day.with_suffix(".gz").unlink()
    day.symlink_to("day_2")
    assert "day_11 has the same rows as" in refused(logs, out)
    day.unlink()
    for make, part in (
        (lambda: day.symlink_to("nowhere"), "day_11 is a broken link or not a regular file"),
        (lambda: os.mkfifo(day), "day_11 is a broken link or not a regular file"),
    ):
        make()
        assert part in refused(logs, out)
        day.unlink()
    empty = tmp_path / "empty"
    empty.touch()
    assert "empty is not a click log (it is empty)" in refused(empty, out)
    for number, data in enumerate((packed[:5], packed[:-9], b"no gzip", packed[:-9] + b"x" * 9)):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(data)
        assert f"{path} is damaged or incomplete: " in refused(path, out)
    path.write_bytes(packed[:2000] + bytes(100) + packed[2100:])
    assert f"{path} is damaged or incomplete: " in refused(path, out)


def test_empty_files_of_a_directory_are_named_and_left_out(source, tmp_path, capsys):
    """Empty files, such as Spark writes, are named and left out."""
    logs = tmp_path / "logs"
    shutil.copytree(source, logs)
    for name in ("_SUCCESS", "part-7"):
        (logs / name).touch()
    assert prepare(logs, tmp_path / "out") == 0
    assert "left out, because they are empty: _SUCCESS, part-7" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["csv", "rows", "tfrecord"])
def test_a_source_that_changes_meanwhile_is_refused(source, prepared, tmp_path, monkeypatch, capsys, format):
    """While a chunk is parsed, its source grows by a byte or loses half its size."""
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
        assert f"{path} changed during the run" in capsys.readouterr().err
        assert not list(out.glob(".prepare/unit.*" if format != "csv" else ".prepare/unit.0.0.*"))


@pytest.mark.parametrize("format", ["rows", "tfrecord"])
def test_a_damaged_file_of_a_prepared_source_is_named(source, tmp_path, capsys, format):
    made = tmp_path / "made"
    assert prepare(source / "day_10", made, "--format", format, "--shards", 2) == 0
    path = sorted(made.glob("train-00001*"))[0]
    data = path.read_bytes()
    path.write_bytes(data[:-300])
    assert prepare(made, tmp_path / "out") == 2
    assert f"{path} is damaged: it has {len(data) - 300} bytes" in capsys.readouterr().err
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert prepare(made, tmp_path / "out") == 2
    assert f"{path} is damaged: its checksum differs from the one in its index" in capsys.readouterr().err


def test_what_an_interrupted_run_has_left_damaged_is_done_again(source, tmp_path, monkeypatch, capsys):
    """In both passes, damaged notes, offsets and sorted rows are made again."""
    words = ("--shards", 3, "--format", "tfrecord", "--chunk", 0.2)
    whole, out, gather, damaged_names = tmp_path / "whole", tmp_path / "out", criteo.gather, []
    assert prepare(source / "day_10", whole, *words) == 0
    own = out / ".prepare"

    def interrupted() -> None:
        left = iter((1, 1, 0))  # two files of pass 2 are written before the interruption
        with monkeypatch.context() as patch:
            patch.setattr(criteo, "gather", lambda *words: (1 // next(left), gather(*words))[1])
            with pytest.raises(ZeroDivisionError):
                prepare(source / "day_10", out, *words, "--overwrite")

    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)

    def flip(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    for name in (
        "unit.0.*.json", "sorted.*.rows.npy", "sorted.*.ends.npy", "cuts.npy", "runs.json",
        "train-*.tfrecord.json", "train-*.offsets.npy",
    ):  # fmt: skip
        for damage in (cut, flip):
            interrupted()
            paths = [path for path in own.glob(name) if damage is not flip or path.suffix == ".npy"]
            damaged_names += [path.name for path in paths]
            for path in paths[:1]:
                damage(path)
            assert prepare(source / "day_10", out, *words) == 0
            assert contents(out) == contents(whole), (name, damage)
    assert {"cuts.npy", "runs.json"} < {*damaged_names}
    interrupted()
    cut(own / "criteo.json")
    assert prepare(source / "day_10", out, *words) == 2
    assert f"{own}/criteo.json is damaged. Start again with --overwrite" in capsys.readouterr().err
    assert prepare(source / "day_10", out, *words, "--overwrite") == 0
    cut(out / "train-00001-of-00003.tfrecord")
    assert prepare(source / "day_10", out, *words) == 2
    assert "train-00001-of-00003.tfrecord is damaged: it has " in capsys.readouterr().err


def test_files_of_others_are_never_removed(prepared, tmp_path, capsys):
    """Files that no index or plan lists are never removed, nor are the files being read."""
    own = tmp_path / "own"
    assert prepare(prepared, own, "--shards", 2, "--format", "tfrecord") == 0
    before = contents(own)
    for words in ((own, own), (own / "train-00000-of-00002.tfrecord", tmp_path)):
        assert prepare(*words, "--overwrite") == 2
        assert "is in DST" in capsys.readouterr().err
    for name in ("train.json", "train.npy", "validation.json", "validation.npy", ".prepare/criteo.json"):
        (own / name).unlink()
    for words in ((), ("--overwrite",)):
        assert prepare(prepared, own, *words) == 2
        assert "do not belong to any index" in capsys.readouterr().err
    assert contents(own).items() <= before.items()
    assert len(contents(own)) == 3


def test_a_validation_that_is_nothing_says_what_it_may_be(capsys):
    assert main(["prepare", "criteo", "a", "b", "--validation", "nowhere"]) == 2
    assert "--validation: 'nowhere' is neither an existing file or directory nor" in capsys.readouterr().err


def test_info_and_verify(source, tmp_path, capsys):
    assert prepare(source, tmp_path, "--shards", 2, "--format", "tfrecord") == 0
    assert main(["info", str(tmp_path)]) == 0
    summary = "train: 9000 rows of 39 fields, ids below 1000000, in 2 files (tfrecord), "
    assert summary in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--decode"]) == 0
    assert "train: checked 9000 rows in 2 files, " in capsys.readouterr().out
    path = tmp_path / "train-00001-of-00002.tfrecord"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"values", b"volues", 1))
    assert main(["verify", str(tmp_path), "--decode"]) == 1
    out = capsys.readouterr().out
    assert "checksum" in out
    assert f"{path}, record 1: " in out


def test_real_rows(tmp_path):
    path = Path(__file__).parents[4] / "shared/data/ctr/criteo_sample.csv"
    if not path.exists():
        pytest.skip("needs the sample of Criteo's rows")
    assert prepare(path, tmp_path, "--shards", 3) == 0
    assert len(rows(tmp_path)) == 200
    sizes = [file.rows for file in Table.open(tmp_path).files]
    assert (len(sizes), sum(sizes)) == (3, 200)
    assert min(sizes) > 40


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_each_file_gets_its_share_of_the_rows(share):
    names, held = [str(number) for number in range(7)], 2 if share else 0
    plan = shuffle.ShufflePlan([], names, held, "rows", 100, share, None, 1)
    keys = mixed(np.arange(70_000, dtype=np.uint64))
    expected = np.where(np.arange(7) < held, share / max(held, 1), (1 - share) / (7 - held))
    shares = np.bincount(plan.file_of(keys, 0), minlength=7) / len(keys)
    assert np.abs(shares - expected).max() < 0.005
    if held:
        assert (plan.file_of(keys, 1) < held).all(), "validation rows in training files"
    last = plan.file_of(np.array([0, 2**64 - 1], np.uint64), 0)
    assert last.tolist() == [0, 6]


def test_several_processes_write_the_same_bytes(source, prepared, tmp_path):
    words = ("--shards", 4, "--validation", 0.1, "--chunk", 1, "--table-size", 5000, "-np", 2)
    assert main([str(word) for word in ("prepare", "criteo", source, tmp_path, *words)]) == 0
    assert contents(tmp_path) == contents(prepared)


MEASURED = """
import resource, sys
from ringdance.tools.data import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
code = main(["prepare", "criteo", *sys.argv[2:]])
print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
sys.exit(code)
"""


@pytest.mark.parametrize(("runs", "limit", "processes"), [
    (150, 64, 1), pytest.param(20_000, 1024, 2, marks=[pytest.mark.slow, pytest.mark.limit(1800)]),
])  # fmt: skip
def test_many_runs_need_few_open_files_and_little_memory(tmp_path, runs, limit, processes):
    """Each row is there exactly once. Every run has some rows for every file."""
    source, chunk, count = tmp_path / "train.txt", 2048, 0
    with open(source, "wb") as file:
        for part in planted(runs * 10, seed=5):
            for line in criteo_lines(part, "\t").splitlines(keepends=True):
                if file.tell() < runs * chunk:
                    file.write(line)
                    count += 1
    words = [source, tmp_path / "out", "--shards", 16, "--chunk", chunk / (1 << 20), "-np", processes]
    command = [sys.executable, "-c", MEASURED, *map(str, [limit, *words])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1 << 20, "The peak memory must be below 1 GiB (in KiB)."
    table = Table.open(source, table_size=1_000_000, format="csv")
    there = table.read(np.arange(len(table))).packed()
    written = Table.open(tmp_path / "out").read(np.arange(count)).packed()
    assert len(written) == len(there) == count
    assert sorted(row.tobytes() for row in written) == sorted(row.tobytes() for row in there)
