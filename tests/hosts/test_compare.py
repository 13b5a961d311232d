"""`benchmarks/strategies/compare.py -H`: the strategies of several processes on several hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hosts import Hosts

pytestmark = pytest.mark.limit(500)
RINGDANCE = (sys.executable, "-m", "ringdance")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "strategies" / "compare.py"
STRATEGIES = {
    "tensorflow": ("ringdance", "single", "multi_worker_mirrored", "parameter_server"),
    "torch": ("ringdance", "ddp"),
}


def test_strategies_on_two_hosts_reach_the_same_auc(three_hosts: Hosts, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    clicks, output = str(tmp_path / "clicks"), tmp_path / "comparison"
    words = ("--rows", "10000", "--table-size", "5000", "--validation", "0.2")
    made = three_hosts.run("h1", *RINGDANCE, "data", "generate", "criteo", clicks, *words)
    assert made.returncode == 0, made.stderr
    for framework, names in STRATEGIES.items():
        done = three_hosts.run(
            "h1", sys.executable, str(SCRIPT), clicks, "-H", "h2:1,h3:1", "--framework",
            framework, "--strategies", ",".join(names), "--dim", "4", "--hidden", "16", "--batch-size", "256",
            "--output", str(output), timeout=240.0,  # four strategies, one with five processes
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    results = {path.stem: json.loads(path.read_text()) for path in output.glob("*-*.json")}
    assert len(results) == 6
    processes = {name: value["processes"] for name, value in results.items()}
    assert processes == {name: 1 if "single" in name else 5 if "server" in name else 2 for name in results}
    aucs = {name: value["curve"][-1][2] for name, value in results.items()}
    assert aucs.pop("tensorflow-parameter_server") > 0.55
    assert max(aucs.values()) - min(aucs.values()) < 0.002, aucs
    for name in three_hosts.names:
        three_hosts.run(name, "sh", "-c", 'rm -rf "$TMPDIR/__pycache__"')  # TensorFlow's AutoGraph leaves it
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]
