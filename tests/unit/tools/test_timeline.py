"""The summary of a timeline."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringdance.core.monitor.chrome import ChromeWriter
from ringdance.tools.report import timeline
from ringdance.tools.report.summary import Cover, summarize
from ringdance.tools.report.trace import load

MS = 1_000_000
BATCHES, CHUNKS, WAITS, STEPS = range(4)


def write(path: Path, steps: int = 5) -> Path:
    """Write steps of 100 ms. Ranks submit at 10 ms and 60 ms, and the exchange runs from 70 ms to 90 ms."""
    writer = ChromeWriter(str(path), 0, 0.0)
    writer.process(1_000_000, "rank 0 on node1 (pid 7)", 0)
    writer.process(1_000_001, "rank 1 on node2 (pid 8)", 1)
    writer.process(2_000_000, "allreduce.w", 2)
    for rank in range(2):
        writer.thread(2_000_000, rank, f"rank {rank}")
        for tid, name in enumerate(("batches", "chunks", "waits", "steps")):
            writer.thread(1_000_000 + rank, tid, name)
    for step in range(steps):
        for rank, submitted in ((0, 10), (1, 60)):
            pid, at = 1_000_000 + rank, (1000 + step * 100) * MS
            writer.begin(2_000_000, rank, "NEGOTIATE_ALLREDUCE", at + submitted * MS)
            writer.end(2_000_000, rank, "NEGOTIATE_ALLREDUCE", at + 70 * MS, round=step, process_set=0)
            writer.span(pid, BATCHES, "ALLREDUCE", at + 70 * MS, at + 90 * MS, bytes=5)
            writer.span(pid, CHUNKS, "WAIT_FOR_DATA", at + 70 * MS, at + 75 * MS)
            writer.span(pid, CHUNKS, "MPI_ALLREDUCE", at + 75 * MS, at + 88 * MS)
            writer.span(pid, WAITS, "WAIT", at + (20 + 60 * rank) * MS, at + 90 * MS)
            writer.instant(pid, STEPS, f"step {step + 1}", at + 95 * MS)
    writer.begin(2_000_000, 0, "NEGOTIATE_ALLREDUCE", (1000 + steps * 100) * MS)
    writer.close()
    return path


def test_a_step_s_time_is_divided(tmp_path: Path) -> None:
    summary = summarize(load(write(tmp_path / "t.json")))
    slow, quick = summary["ranks"]
    expected = {
        0: {"step": 100, "compute": 30, "exposed": 70, "negotiate": 50, "wait_for_data": 5, "reduce": 13,
            "copy_in": 0, "copy_out": 0, "other": 2, "hidden": 0},
        1: {"step": 100, "compute": 90, "exposed": 10, "negotiate": 0, "wait_for_data": 0, "reduce": 8,
            "copy_in": 0, "copy_out": 0, "other": 2, "hidden": 10},
    }  # fmt: skip
    for row in (slow, quick):
        for name, value in expected[row["rank"]].items():
            assert row[f"{name}_seconds"] * 1000 == pytest.approx(value), name
    assert (slow["rank"], slow["host"], slow["pid"], slow["steps"]) == (1, "node2", 8, 4)
    assert [row["step"] for row in summary["steps"]] == [2, 3, 4, 5]
    sentence = "Rank 1 on node2 is late in 100% of the steps, by 60 ms of 100: the others wait for it."
    assert summary["sentence"] == sentence
    assert {row["slowest_rank"] for row in summary["steps"]} == {1}
    (tensor,) = summary["tensors"]
    assert (tensor["tensor"], tensor["times"], tensor["late_rank"], tensor["late_share"]) == (
        "allreduce.w", 5, 1, 1.0,
    )  # fmt: skip
    assert tensor["late_seconds"] == pytest.approx(5 * 0.05)
    assert tensor["negotiate_seconds"] == pytest.approx(0.06)
    (left,) = summary["unfinished"]
    assert (left["tensor"], left["submitted_by"], left["missing"]) == ("allreduce.w", [0], [1])


def test_files_that_end_anywhere_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    data = write(tmp_path / "t.json").read_bytes()
    cut = tmp_path / "cut.json"
    lengths = []
    for length in (*range(len(data) - 300, len(data)), len(data) * 2 // 3):
        cut.write_bytes(data[:length])
        lengths.append(len(summarize(load(cut))["steps"]))
    assert set(lengths) <= {2, 3, 4}
    assert lengths[-1] < lengths[-2] == 4


def test_any_file_of_chrome_is_read(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = json.loads(write(tmp_path / "t.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"traceEvents": events}))
    assert summarize(load(other)) == summarize(load(tmp_path / "t.json"))


def test_what_another_program_has_written_is_no_figure(tmp_path: Path) -> None:
    """Foreign events do not count: a span among steps, a rank without a process, steps of no duration."""
    path = write(tmp_path / "t.json")
    expected = summarize(load(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())
    span = {"ph": "X", "pid": 1_000_000, "tid": STEPS, "name": "foo", "ts": 1e6, "dur": 2}
    path.write_text(json.dumps([*events, span]))
    assert summarize(load(path)) == expected
    lacks = [event for event in events if event["pid"] != 1_000_000]
    path.write_text(json.dumps(lacks))
    found = summarize(load(path))
    assert ([row["rank"] for row in found["ranks"]], found["tensors"], found["unfinished"]) == ([1], [], [])
    path.write_text(json.dumps([event | {"ts": 5} if event["ph"] == "i" else event for event in lacks]))
    assert summarize(load(path))["sentence"] == "No rank is late. Waiting for exchanges takes 0% of a step."


def test_without_marks_the_whole_file_is_one_step(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json")
    lines = [line for line in path.read_text().splitlines() if '"step ' not in line]
    path.write_text("\n".join(lines))
    summary = summarize(load(path))
    assert not summary["steps_marked"]
    assert summary["steps"] == []
    assert summary["ranks"][0]["step_seconds"] == pytest.approx(0.47)


@pytest.mark.parametrize("marked", [True, False])
def test_time_whose_records_are_lost_is_left_out_where_no_step_is_whole(tmp_path: Path, marked: bool) -> None:
    """The first 60 ms of each 100 ms step are lost. The rank waits for an exchange from 40 ms to 90 ms."""
    path = tmp_path / "t.json"
    writer = ChromeWriter(str(path), 0, 0.0)
    writer.process(1_000_000, "rank 0 on node1 (pid 7)", 0)
    for tid, name in enumerate(("batches", "chunks", "waits", "steps")):
        writer.thread(1_000_000, tid, name)
    for step in range(5):
        at = (1000 + step * 100) * MS
        writer.span(1_000_000, STEPS, "1000 records lost", at, at + 60 * MS)
        writer.span(1_000_000, WAITS, "WAIT", at + 40 * MS, at + 90 * MS)
        for thread, name in ((BATCHES, "ALLREDUCE"), (CHUNKS, "MPI_ALLREDUCE")):
            writer.span(1_000_000, thread, name, at + 50 * MS, at + (90 if marked or step < 4 else 100) * MS)
        if marked:
            writer.instant(1_000_000, STEPS, f"step {step}", at + 100 * MS)
    writer.close()
    summary = summarize(load(path))
    (row,) = summary["ranks"]
    steps = 1 if marked else 5
    expected = {"step": 40, "compute": 10, "exposed": 30, "reduce": 30, "negotiate": 0, "other": 0}
    for name, value in expected.items():
        assert row[f"{name}_seconds"] * 1000 == pytest.approx(steps * value, abs=1e-6), name
    assert row["steps"] == (4 if marked else 1)
    assert "5000 of rank 0. The summary skips the time they cover" in summary["notes"][0]


def test_covered_time() -> None:
    cover = Cover([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (4.0, 4.5)])
    assert list(cover.within([0.0, 2.0, 6.0, 9.0])) == pytest.approx([1.0, 3.5, 1.0])
    assert list(cover.within([0.0, 9.0], Cover([(3.5, 6.0), (8.0, 9.0)]))) == pytest.approx([2.0])


def test_the_tables_and_the_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline.main([str(write(tmp_path / "t.json")), "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "last 2 of 4" in shown
    assert "submitted by ranks 0; missing: 1" in shown
    (tmp_path / "no.json").write_text("{}")
    for name, why in (("none", "No such file"), ("no.json", "is not a timeline")):
        assert timeline.main([str(tmp_path / name)]) == 2
        assert why in capsys.readouterr().err


EVENT = '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "x"}},'
BEGIN = '{"ph": "B", KEY, "name": "x", "ts": 1}'
DAMAGED = (
    '{"ph": "X", KEY, "name": 5, "ts": 1, "dur": 2}',
    '{"ph": "X", KEY, "name": "x", "ts": 1, "dur": 1e999}',
    '{"ph": "X", KEY, "name": "x", "ts": true, "dur": 1}',
    '{"ph": "B", KEY, "name": "x", "ts": NaN}',
    '{"ph": "i", KEY, "name": [], "ts": 1}',
    '{"ph": "C", KEY, "name": "x", "ts": 1, "args": {"value": ""}}',
    '{"ph": "M", KEY, "name": "process_name", "args": {"name": 5}}',
    '{"ph": "M", KEY, "name": "thread_name", "args": {"name": null}}',
    '{"ph": "E", KEY, "ts": 1, "args": {"round": 1, "process_set": []}}',
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", ", line 1 is not a timeline"),
        ("[" * 100_000, " is not a timeline"),
        ("null", " is not a timeline"),
        (f"[\n{EVENT}\nnull,\n{EVENT}\n]\n", ", line 3 is not a timeline"),
        (f'[\n{EVENT}\n{{"name": \n{EVENT}\n]\n', ", line 3 is not a timeline"),
        (f'{{"traceEvents": [{EVENT} 5]}}', ", event 2 is not a timeline"),
        *((f"[{EVENT} {BEGIN}, {event}]", ", event 3 is not a timeline") for event in DAMAGED),
    ],
)
def test_what_is_no_timeline_is_named(
    tmp_path: Path, text: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    path.write_text(text.replace("KEY", '"pid": 1, "tid": 1'))
    assert timeline.main([str(path)]) == 2
    assert capsys.readouterr().err == (
        f"ringdance timeline: {path}{place}: it is not in Chrome's JSON format. "
        "Pass a file that `ringdance run --timeline FILE` has written\n"
    )


@pytest.mark.limit(20)
def test_files_without_an_end_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        assert timeline.main([str(path)]) == 2
        assert f"{path} is not a regular file. Copy" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--tensors"])
def test_fewer_than_no_rows_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timeline.main([str(write(tmp_path / "t.json")), option, "-1"]) == 2
    assert f"argument {option}: -1: must be at least 0" in capsys.readouterr().err
