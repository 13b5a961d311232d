"""The benchmark that creates its own hosts: it runs, checks sums, and writes what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import why_not

pytestmark = pytest.mark.limit(200)
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "wire.py"


@pytest.mark.skipif(bool(why_not()), reason=f"simulated hosts: {why_not()}")
@pytest.mark.parametrize("slots", [1, 2])
def test_the_benchmark_of_the_wire(tmp_path: Path, slots: int) -> None:
    line = [sys.executable, str(SCRIPT), "--size", str(3 << 20), "--seconds", "0.5", "--rounds", "1"]
    line += ["--slots", str(slots), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    assert f"wire: {2 * slots} ranks on 2 hosts" in done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["bound_ms"] == pytest.approx((3 << 20) * 8 / 1e6)
    assert sorted(name.partition(",")[0] for name in report["results"]) == ["engine", "raw"]
    assert all(result["least"] > 0 and result["count"] for result in report["results"].values())
