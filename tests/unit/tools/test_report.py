"""What a report says, with made-up metrics. Reports of real runs are in tests/browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ringdance.core.monitor.chrome import ChromeWriter
from ringdance.tools.report import cli as report
from ringdance.tools.report.bottlenecks import judge
from ringdance.tools.report.metrics import read_run

STEP_S = 0.1


def write(
    directory: Path, exposed: list[float], cores: float = 1.0, host_cpu: float = 50.0,
    gpu: float | None = None, host_cores: int = 0,
) -> Path:  # fmt: skip
    """Write the metrics of ranks, two per host, that wait ``exposed`` of their time and use ``cores``."""
    directory.mkdir(exist_ok=True)
    for rank, share in enumerate(exposed):
        rows: list[dict[str, Any]] = []
        for second in range(0, 30, 5):
            # Nothing may be counted from the first step, which takes 20 s.
            steps = 0 if second == 0 else 1 + round((second - 5) / STEP_S)
            row: dict[str, Any] = {
                "time": 1000.0 + second + 20 * bool(second), "rank": rank, "host": f"node{rank // 2}",
                "pid": 100 + rank, "size": len(exposed), "steps": steps, "batches": steps, "tensors": steps,
                "bytes": steps * 1_000_000, "exposed_seconds": share * second + 7 * bool(second),
                "cpu_seconds": cores * second, "rss_bytes": 1 << 30, "host_cpu_percent": host_cpu,
                "host_memory_percent": 20.0, **({"host_cores": host_cores} if host_cores else {}),
            }  # fmt: skip
            if steps:
                row["last_step_time"] = row["time"]
            if gpu is not None:
                row["gpu_percent"] = gpu
            rows.append(row)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with (directory / f"metrics-{rank // 2 * 2}.jsonl").open("a") as file:
            file.write(text + '{"time": 12')  # the monitor was killed here
            file.write("\n")
    return directory


@pytest.mark.parametrize(
    ("exposed", "more", "bound"),
    [
        ([0.5, 0.52, 0.55, 0.5], {}, "communication"),
        ([0.6, 0.6, 0.05, 0.6], {}, "skew"),
        ([0.7, 0.7, 0.3, 0.7], {}, "skew"),  # more skew than communication
        ([0.55, 0.6, 0.3, 0.5], {}, "communication"),
        ([0.1, 0.1, 0.05, 0.1], {}, "computation"),
        ([0.1, 0.1, 0.1, 0.1], {"cores": 0.1}, "input"),
        ([0.1, 0.1, 0.1, 0.1], {"cores": 0.4, "host_cpu": 99.0}, "computation"),  # ranks share too few cores
        ([0.1, 0.1, 0.1, 0.1], {"gpu": 15.0}, "input"),
        ([0.1, 0.1, 0.1, 0.1], {"gpu": 95.0, "cores": 0.1}, "computation"),
        ([0.9], {"cores": 1.0}, "computation"),
    ],
)
def test_what_limits_a_run(tmp_path: Path, exposed: list[float], more: dict[str, Any], bound: str) -> None:
    run = read_run(write(tmp_path, exposed, **more))
    assert run.steps_per_second == pytest.approx(1 / STEP_S)
    assert [rank.exposed for rank in run.ranks] == pytest.approx(exposed)
    verdict = judge(run)
    assert verdict.bound == bound
    assert bound != "skew" or "rank 2 on host node1" in verdict.sentence


@pytest.mark.parametrize(("host_cpu", "bound"), [(50.0, "skew"), (99.0, "computation")])
def test_ranks_that_are_late_in_turn_are_no_communication(
    tmp_path: Path, host_cpu: float, bound: str
) -> None:
    run = read_run(write(tmp_path, [0.35, 0.3, 0.33], host_cpu=host_cpu))
    assert judge(run).bound == "communication"
    assert judge(run, uneven=0.25).bound == bound


@pytest.mark.parametrize(("own", "bound"), [(0.5, "other programs"), (2.0, "computation")])
def test_nothing_is_blamed_beside_other_programs(tmp_path: Path, own: float, bound: str) -> None:
    run = read_run(write(tmp_path, [0.02, 0.02], cores=own, host_cpu=98.0, host_cores=4))
    verdict = judge(run)
    assert verdict.bound == bound
    assert ("Other programs use 73% of the cores of node0" in verdict.sentence) is (own < 1)


@pytest.mark.parametrize(
    ("exposed", "cores", "bound"),
    [
        ([0.9, 0.0], 0.04, "skew"),
        ([0.02, 0.02], 0.02, "input"),
        ([0.9, 0.0], 0.3, "other programs"),
        ([0.5, 0.5], 0.04, "other programs"),  # exchanges may lack cores
    ],
)
def test_who_hardly_uses_a_core_is_not_slowed_by_other_programs(
    tmp_path: Path, exposed: list[float], cores: float, bound: str
) -> None:
    run = read_run(write(tmp_path, exposed, cores=cores, host_cpu=99.0, host_cores=4))
    verdict = judge(run)
    assert verdict.bound == bound
    assert ("They may be waiting for cores: other programs use" in verdict.sentence) is (bound == "input")


def test_the_page_is_well_formed_and_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = write(tmp_path / "<one>", [0.1], gpu=50.0)
    four = write(tmp_path / "a&b", [0.6, 0.6, 0.05, 0.6], gpu=50.0)
    assert report.main([str(single), str(four), "-o", str(tmp_path / "page.html")]) == 0
    stdout = capsys.readouterr().out
    assert stdout.startswith("Bound by skew. The others wait for rank 2 on host node1.")
    assert "Try next: " in stdout
    text = (tmp_path / "page.html").read_text()
    assert "&lt;one&gt;" in text
    assert "a&amp;b" in text
    assert "<one>" not in text
    for picture in text.split("<svg")[1:]:
        root = ElementTree.fromstring(f"<svg{picture.partition('</svg>')[0]}</svg>")
        assert root.find("title") is not None
        assert root.find("desc") is not None


@pytest.mark.parametrize("pid", [100, 7])
def test_the_timeline_of_an_earlier_run_is_told_apart(
    tmp_path: Path, pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the earlier timeline, its rank always waits for others, so this run would be bound by skew."""
    run = write(tmp_path / "run", [0.3, 0.3])
    writer = ChromeWriter(str(run / "timeline.json"), 0, 0.0)
    writer.process(1_000_000, f"rank 0 on node0 (pid {pid})", 0)
    for tid, name in ((2, "waits"), (3, "steps")):
        writer.thread(1_000_000, tid, name)
    writer.span(1_000_000, 2, "WAIT", 0, 100_000_000)
    writer.close()
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"Bound by {'skew' if pid == 100 else 'communication'}. ")
    assert ("<h2>Timeline" in (run / "report.html").read_text()) is (pid == 100)
    assert report.main([str(run), "--timeline", str(run / "timeline.json")]) == (0 if pid == 100 else 2)
    assert ("timeline.json is the timeline of another run" in capsys.readouterr().err) is (pid == 7)


def test_a_last_interval_of_milliseconds_is_no_spike(tmp_path: Path) -> None:
    """When ranks leave, the monitor writes a last sample. A step may end between two of its values."""
    write_rank(tmp_path / "metrics-0.jsonl", 0, "A", 1, 100.0, 0.5, 1)
    rows = (tmp_path / "metrics-0.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    last |= {"time": last["time"] + 0.01, "last_step_time": last["time"] + 0.002, "steps": last["steps"] + 1}
    (tmp_path / "metrics-0.jsonl").write_text("\n".join([*rows, json.dumps(last)]))
    (rank,) = read_run(tmp_path).ranks
    assert [rate for _, rate in rank.rates()] == pytest.approx([2.0, 2.0, 2.0, 11 / 5.002])
    assert rank.rates()[-1][0] == last["last_step_time"]


def test_samples_are_shown_once_the_batch_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"one": 1, "four": 4, "same": 4}
    runs = [str(write(tmp_path / name, [0.1] * size)) for name, size in sizes.items()]
    assert report.main(runs) == 0
    assert "\n10 steps/s; for samples/s, pass `--batch-size N` (" in capsys.readouterr().out
    assert report.main([*runs, "--batch-size", "32"]) == 0
    assert "\n10 steps/s; 1,280 samples/s of all ranks\n" in capsys.readouterr().out
    text = (tmp_path / "same/report.html").read_text()
    assert '<th scope="col">samples/s</th><th scope="col">efficiency</th>' in text
    assert [text.count(f"<td>{rate}</td><td>100%</td>") for rate in ("320", "1280")] == [1, 2]


def test_a_run_of_few_steps_says_so(tmp_path: Path) -> None:
    file = write(tmp_path, [0.1]) / "metrics-0.jsonl"
    text = "Based on only {}. A longer run says more."
    lines = file.read_text().splitlines()
    assert not any("Judged" in line for line in judge(read_run(tmp_path)).evidence)
    late = json.loads(lines[1]) | {"steps": 2, "time": 1030.0, "last_step_time": 1030.0}
    file.write_text("\n".join([*lines[:2], json.dumps(late)]))
    assert text.format("1 step per rank") in judge(read_run(tmp_path)).evidence


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 2
    assert "--output-filename" in capsys.readouterr().err
    (tmp_path / "empty" / "rank.0").mkdir()  # --output-filename creates this directory
    assert report.main([str(tmp_path / "empty")]) == 2
    assert ": its ranks have not completed a call to hvd.init()" in capsys.readouterr().err
    stderr = "Traceback (most recent call last):\n...\nModuleNotFoundError: No module named 'torchvision'\n\n"
    (tmp_path / "empty" / "rank.0" / "stderr").write_text(stderr)
    assert report.main([str(tmp_path / "empty")]) == 2
    last = "No module named 'torchvision'\". If that is not the reason, its ranks have not completed"
    assert f"a rank's stderr ends with \"ModuleNotFoundError: {last}" in capsys.readouterr().err
    still = tmp_path / "still"
    write(still, [0.1])
    lines = (still / "metrics-0.jsonl").read_text().splitlines()
    (still / "metrics-0.jsonl").write_text(lines[0])
    assert report.main([str(still)]) == 2
    assert "mark_step" in capsys.readouterr().err
    (still / "metrics-0.jsonl").write_text("\n".join(json.dumps(
        {**json.loads(lines[1]), "time": 1000.0 + second, "steps": 9 * (second > 1), "last_step_time": 1001.5}
    ) for second in range(3)))  # a sample each second
    assert report.main([str(still)]) == 2
    stderr = capsys.readouterr().err
    assert "took only 2.0 s" in stderr
    assert stderr.endswith("RINGDANCE_METRICS_INTERVAL=0.2\n")


@pytest.mark.parametrize(
    "line",
    [
        "null", "[]", "5", '{"rank": 0}', "[" * 100_000, '"host_cores": []', '"gpu_percent": null',
        '"time": 1e999', '"cpu_seconds": NaN', '"steps": 1.5', '"size": true', '"host": 5',
    ],
)  # fmt: skip
def test_lines_that_are_no_samples_are_named(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run", [0.1]) / "metrics-0.jsonl"
    cut = len(file.read_text().splitlines())
    assert report.main([str(file.parent)]) == 0
    assert capsys.readouterr().err == f"ringdance report: skipping truncated line {cut} of {file}\n"
    if line.startswith('"'):
        line = f"{file.read_text().partition('}')[0]}, {line}}}"
    file.write_text(f"{line}\n{file.read_text()}")
    assert report.main([str(file.parent)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"ringdance report: line 1 of {file} was not written by ")
    assert stderr.count("\n") == 1


def write_rank(file: Path, rank: int, host: str, pid: int, began: float, step: float, size: int) -> None:
    """Append the metrics of a rank that takes 10 steps between two samples."""
    with file.open("a") as samples:
        for number in range(5):
            row = {"rank": rank, "host": host, "pid": pid, "size": size, "steps": number * 10}
            row |= dict.fromkeys(("bytes", "rss_bytes", "exposed_seconds", "cpu_seconds"), 0)
            row |= dict.fromkeys(("time", "last_step_time"), began + number * 10 * step)
            samples.write(json.dumps(row) + "\n")


def test_the_last_process_of_each_rank_counts(tmp_path: Path) -> None:
    """A host with two ranks joined an elastic job. One rank moved, and some process IDs are the same."""
    first, second, third = (tmp_path / f"metrics-{number}.jsonl" for number in range(3))
    for rank, file, host in ((0, first, "A"), (1, second, "B"), (2, second, "B")):
        write_rank(file, rank, host, 1 + rank, 0.0, 0.1, 3)
    for rank, file, host in ((0, first, "A"), (1, first, "A"), (2, third, "B"), (3, third, "B")):
        write_rank(file, rank, host, 11 if rank == 2 else 2, 100.0, 0.5, 4)
    run = read_run(tmp_path)
    assert [(rank.rank, rank.host) for rank in run.ranks] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    assert [rank.step_seconds for rank in run.ranks] == pytest.approx([0.5] * 4)
    assert [len(rank.rows) for rank in run.ranks] == [5] * 4


def test_files_of_an_earlier_run_with_more_hosts_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        host, began, step, size = ("A", 100.0, 0.5, 2) if rank < 2 else ("B", 0.0, 0.1, 4)
        write_rank(tmp_path / f"metrics-{rank // 2 * 2}.jsonl", rank, host, rank, began, step, size)
    run = read_run(tmp_path)
    assert ([rank.rank for rank in run.ranks], run.size, run.hosts) == ([0, 1], 2, ["A"])
    assert (run.steps_per_second, run.seconds) == pytest.approx((2.0, 20.0))


def test_figures_are_of_the_training_alone(tmp_path: Path) -> None:
    """Metrics before the end of the first step, or after the last step, do not count."""
    file = write(tmp_path, [0.1], cores=1.0, host_cpu=40.0, gpu=90.0) / "metrics-0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
    busy = {"host_cpu_percent": 100.0, "gpu_percent": 0.0}
    rows = [rows[0] | busy, rows[1] | busy, *rows[2:]]  # the second sample belongs to the first step
    late = {"time": rows[-1]["time"] + 1000, "cpu_seconds": rows[-1]["cpu_seconds"] + 9000}
    rows.append(rows[-1] | busy | late)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert (run.mean("host_cpu_percent"), run.ranks[0].gpu) == (40.0, 90.0)
    assert run.ranks[0].cores == pytest.approx(1.0)
