"""The arithmetic of `ringdance bench train`, its file, table and plot, and what it refuses."""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from random import Random
from statistics import fmean
from typing import Any

import pytest

from ringdance.core.reports.judging import spread
from ringdance.tools.bench import cli as bench
from ringdance.tools.bench import train as bench_train
from ringdance.tools.bench.measure import assumed
from ringdance.tools.bench.train import figures, sizes, table, text
from ringdance.tools.plan.planner import from_bench

KEYS = {
    "ranks", "hosts", "cores", "threads", "ranks_per_host", "gpus", "images_per_second", "noise",
    "step_seconds", "exposed_share", "single_steps", "efficiency", "bound", "gradients", "others",
}  # fmt: skip


def rank(host: str, own: list[float], alone: list[float], exchange: float, **more: Any) -> dict[str, Any]:
    blocks = {"ringdance": own, "alone": alone, "ddp": [0.4] * len(own)}
    return {
        "host": host, "cores": 8, "local_size": 1, "gpu": False, "blocks": blocks, "single": [0.1] * 12,
        "gradients": [("fc.bias", 40, 0.05), ("fc.weight", 400, 0.06)], "assumed": False,
        "exchange": exchange, "busy": 0.5, "used": 4.0, **more,
    }  # fmt: skip


def content() -> dict[str, Any]:
    first = figures([rank("a", [0.1, 0.1, 0.1], [0.1, 0.1, 0.1], 0.0)], 32, 4)
    # The slowest rank determines the time of a block: 0.2, 0.25, 0.3.
    ranks = [
        rank("a", [0.2, 0.2, 0.2], [0.12] * 3, 0.05), rank("b", [0.1, 0.25, 0.3], [0.15] * 3, 0.06)
    ]  # fmt: skip
    second = figures(ranks, 32, 4, first["images_per_second"])
    about = {"model": "convnet", "framework": "torch", "gradient_dtype": "float32", "batch": 32}
    return about | {"sizes": [first, second]}


def test_speeds_are_those_of_the_slowest_rank() -> None:
    first, second = content()["sizes"]
    assert set(first) == set(second) == KEYS
    assert first["images_per_second"] == pytest.approx(320)
    assert first["efficiency"] == 1
    assert first["noise"] == 0
    assert second["step_seconds"] == {"ringdance": 0.25, "alone": 0.15, "ddp": 0.4}
    assert second["images_per_second"] == pytest.approx(2 * 32 / 0.25)
    assert second["efficiency"] == pytest.approx(0.1 / 0.25)
    assert second["exposed_share"] == pytest.approx(0.4)
    assert second["bound"] == pytest.approx(2 * 32 / 0.15)
    assert (second["ranks"], second["hosts"], second["cores"], second["ranks_per_host"]) == (2, 2, 8, 1)
    assert second["gradients"][0] == {"name": "fc.bias", "bytes": 40, "seconds": 0.05}
    json.dumps(second)


def test_other_programs_are_seen_on_the_host_where_they_run() -> None:
    busy = [0.5, 0.5, 0.9]
    ranks = [rank(host, [0.1], [0.1], 0.0, busy=cpu, used=2.0) for host, cpu in zip("aab", busy, strict=True)]
    assert figures(ranks, 32, 4)["others"] == pytest.approx(0.65)
    assert figures(ranks[:2], 32, 4)["others"] == 0


def test_a_hiccup_is_not_the_spread(tmp_path) -> None:
    steady = [0.1, 0.101, 0.099, 0.1005, 0.1, 0.0995] * 2
    several = figures([rank("a", [*steady[:5], 0.3], steady[:6], 0.0, single=[*steady[:11], 0.3])], 32, 4)
    assert several["noise"] < 0.02
    (tmp_path / "bench.json").write_text(json.dumps({"model": "mlp", "batch": 32, "sizes": [several]}))
    assert from_bench(tmp_path / "bench.json").spread == pytest.approx(0.0008, abs=0.0004)
    random = Random(7)
    for count in (3, 6, 12, 60):  # without hiccups, the spread is the standard deviation
        samples = [[random.gauss(10, 1) for _ in range(count)] for _ in range(1000)]
        assert fmean(map(spread, samples)) == pytest.approx(1, abs=0.1)


def test_the_planner_reads_the_file(tmp_path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(content()))
    load = from_bench(tmp_path / "bench.json")
    # A rank computes with its 4 threads, not with all 8 cores of its host.
    assert (load.model, load.batch, load.ranks, load.compute, load.cores) == ("convnet", 32, 1, 0.1, 4)
    assert load.gradients == ((40, 0.05), (400, 0.06))


def test_an_exchange_that_takes_longer_than_the_step_is_the_bound() -> None:
    measured = figures([rank("a", [0.3], [0.1], 0.2), rank("a", [0.3], [0.1], 0.25)], 32, 1, 320.0)
    assert measured["bound"] == pytest.approx(64 / 0.25)
    assert measured["noise"] == 0


def test_a_step_that_seems_quicker_with_the_exchange_has_none_exposed() -> None:
    assert figures([rank("a", [0.1], [0.11], 0.0, assumed=True)], 32, 1)["exposed_share"] == 0
    assert figures([rank("a", [0.1], [0.11], 0.0, assumed=True)], 32, 1)["assumed"] is True


def test_assumed_gradients_fill_the_backward_pass_from_the_last_layer_on() -> None:
    assert assumed([("first", 4), ("last", 8)], 0.3) == [
        ("last", 8, pytest.approx(0.2)), ("first", 4, pytest.approx(0.3))
    ]  # fmt: skip


def test_the_table_has_peers_and_multiples_of_them() -> None:
    rows = table(content())
    assert rows[1]["speed_up"] == pytest.approx(0.8)
    assert rows[1]["of_bound"] == pytest.approx(0.6)
    assert rows[1]["ddp"] == pytest.approx(160)
    shown = text(rows, "images").splitlines()
    assert shown[0].split() == [
        "ranks", "hosts", "images/s", "+-", "speed-up", "efficiency", "exposed", "of", "bound", "ddp"
    ]  # fmt: skip
    assert "40.0%" in shown[2]
    assert "160.0 (x 1.60)" in shown[2]


def test_the_plot_shows_efficiency_in_percent_as_the_table_does(tmp_path, monkeypatch) -> None:
    panels = {}
    monkeypatch.setattr(bench_train.svg, "write", lambda file, drawn, *rest, **more: panels.update(drawn))
    bench_train.draw(tmp_path / "plot.svg", content())
    ours = [y for _, y in panels["Efficiency"]["ringdance"]]
    assert ours == pytest.approx([100 * row["efficiency"] for row in bench_train.table(content())])


def test_the_plot_has_all_lines(tmp_path) -> None:
    bench_train.draw(tmp_path / "plot.svg", content())
    for name in ("ringdance", "ddp", "linear", "bound", "Speed", "Efficiency", "images/s of all ranks"):
        assert name in (tmp_path / "plot.svg").read_text()


def test_numbers_of_ranks() -> None:
    assert sizes("4,2") == [1, 2, 4]
    for wrong in ("", "0,2", "two", "2,-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="1,2,4"):
            sizes(wrong)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model resnet5", "did you mean resnet50?"),
        ("--model deepfm --framework keras", "vgg16, inception_v3. Use --framework torch for"),
        ("--model mlp --framework jax --against ddp", "ddp needs --framework torch, not jax"),
        ("--model inception_v3", "Use --framework keras for this model"),
        ("--model inception_v3 --framework keras --image 64", "needs at least 75 pixels"),
        ("--model mlp --output figures.csv", "ends with .json"),
        ("--model mlp --output nowhere/figures.json", "in an existing directory"),
        ("--model mlp --np 1;2", "positive integers, such as 1,2,4"),
        ("--model mlp --steps 0", "0: must be at least 1"),
        ("--model mlp --np 4 -H localhost:2", "4"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words: str, says: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench_train, "find_spec", lambda name: None if "." in name else find_spec("json"))
    assert bench.main(["train", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert not out


@pytest.mark.parametrize("threads", ["", "abc", "0"])
def test_a_wrong_number_of_threads_is_refused(threads: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert bench.main(["train", "--model", "mlp"]) == 2
    assert f"OMP_NUM_THREADS={threads!r} is invalid: expected a positive integer" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_it_is_measured(tmp_path, capsys) -> None:
    (tmp_path / "directory.json").mkdir()
    os.mkfifo(tmp_path / "fifo.json")
    for name, says in (("directory", "a file name that ends"), ("fifo", "is not a regular file")):
        assert bench.main(["train", "--model", "mlp", "--output", str(tmp_path / f"{name}.json")]) == 2
        assert says in capsys.readouterr().err


def test_a_framework_that_is_missing_is_named_with_what_installs_it(capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench_train, "find_spec", lambda name: None if name == "keras" else find_spec("json"))
    assert bench.main(["train", "--model", "mlp", "--framework", "jax"]) == 2
    assert "--framework jax needs keras. Run: " in capsys.readouterr().err
