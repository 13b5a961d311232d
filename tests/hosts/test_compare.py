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
    found = {one.stem: json.loads(one.read_text()) for one in output.glob("*-*.json")}
    assert len(found) == 6
    processes = {name: one["processes"] for name, one in found.items()}
    assert processes == {name: 1 if "single" in name else 5 if "server" in name else 2 for name in found}
    aucs = {name: one["curve"][-1][2] for name, one in found.items()}
    assert aucs.pop("tensorflow-parameter_server") > 0.55
    assert max(aucs.values()) - min(aucs.values()) < 0.002, aucs
    for name in three_hosts.names:
        three_hosts.run(name, "sh", "-c", 'rm -rf "$TMPDIR/__pycache__"')  # TensorFlow's AutoGraph leaves it
    assert [three_hosts.leftovers(name) for name in three_hosts.names] == [[], [], []]
