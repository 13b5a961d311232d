"""Advice changes with the run, and every sentence has a figure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringdance.tune import advise

STEP_S = 0.1


def write(directory: Path, exposed: list[float], gradients: int = 20_000_000, **values: Any) -> Path:
    """Write figures of ranks, two on each host, that wait so much of their time; steps of 0.1 s."""
    directory.mkdir(exist_ok=True)
    for rank, share in enumerate(exposed):
        text = ""
        for second in range(5, 35, 5):
            steps = round(second / STEP_S)
            row = {
                "time": 1000.0 + second, "rank": rank, "host": f"node{rank // 2}", "pid": 100 + rank,
                "size": len(exposed), "steps": steps, "batches": steps, "tensors": steps,
                "bytes": steps * gradients, "exposed_seconds": share * second,
                "cpu_seconds": values.get("cores", 1.0) * second, "rss_bytes": 1 << 30,
                "host_cpu_percent": 95.0, "host_memory_percent": 20.0, "host_cores": 2,
                "last_step_time": 1000.0 + second, **values,
            }  # fmt: skip
            text += json.dumps({key: value for key, value in row.items() if key != "cores"}) + "\n"
        with (directory / f"metrics-{rank // 2 * 2}.jsonl").open("a") as file:
            file.write(text)
    return directory


def advice(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert advise.main([*map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("exposed", "values", "bound", "scale", "said"),
    [
        ([0.02, 0.02], {}, "computation", "out", "1.9"),
        ([0.02, 0.02], {"host_cpu_percent": 40.0}, "computation", "up", "2.5 times as much"),
        ([0.6, 0.05, 0.6, 0.6], {}, "skew", "not", "Rank 1 on host node0"),
        ([0.1, 0.1, 0.1, 0.1], {"cores": 0.1, "host_cpu_percent": 10.0}, "input", "not", "0.10 cores"),
        ([0.5, 0.52, 0.55, 0.5], {}, "communication", "not", "50% of a step of 100 ms"),
        ([1.0, 1.0], {}, "communication", "not", "100% of a step of 100 ms"),
        ([1.0, 0.0, 1.0, 1.0], {}, "skew", "not", "Rank 1 on host node0"),
        ([0.02, 0.02], {"gpu_percent": 97.0}, "computation", "out", "GPUs are in use for 97%"),
        ([0.02, 0.02], {"gpu_percent": 60.0}, "computation", "up", "1.7 times as much"),
        ([0.02, 0.02], {"gradients": 500_000_000, "gpu_percent": 97.0}, "computation", "not", "advised"),
    ],
)
def test_advice_follows_what_limits_the_run(
    exposed: list[float], values: dict[str, Any], bound: str, scale: str, said: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found = advice(capsys, write(tmp_path / "run", exposed, **values), "--gbits", 25)
    assert (found["bound"], found["scale"]) == (bound, scale)
    assert said in " ".join(found["because"])
    assert re.search(r"\d", found["because"][0])
    assert not any("network" in text for text in found["missing"])


def test_nothing_is_advised_without_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = advice(capsys, write(tmp_path / "run", [0.02, 0.02], gpu_percent=97.0))
    assert found["scale"] == "not"
    assert [text.partition(":")[0] for text in found["missing"]] == ["what more hosts would bring"]
    assert advise.main([str(tmp_path)]) == 2
    assert "--output-filename" in capsys.readouterr().err
    assert advise.main([str(tmp_path / "run"), "--instance", "p9"]) == 2
    assert "p9 is not known" in capsys.readouterr().err


def test_the_network_decides_whether_more_hosts_are_worth_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", [0.02] * 4, gpu_percent=97.0)
    assert advice(capsys, run, "--gbits", 25)["scale"] == "out"
    assert advice(capsys, run, "--gbits", 1)["scale"] == "not"


@pytest.mark.parametrize(
    ("batch", "said"),
    [(64, "35 epochs instead of 35"), (4096, "of the speed won, 8"), (20_000, "beyond 65,536")],
)
def test_the_learning_rate_is_not_always_scaled_in_full(
    batch: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", [0.02] * 4)
    assert said in advice(capsys, run, "--gbits", 25, "--batch-size", batch)["because"][-1]


def test_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise.main([str(write(tmp_path / "run", [0.02] * 2))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Bound by computation. Ranks compute most of the time.", "Do not scale now."]
    assert any(line.startswith("  - Not known: what more hosts would bring") for line in lines)
