"""The benchmark that measures next to the simulator: hosts send as many bytes as predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import why_not

pytestmark = pytest.mark.limit(200)
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "simulated_exchange.py"


@pytest.mark.skipif(bool(why_not()), reason=f"simulated hosts: {why_not()}")
@pytest.mark.parametrize(("hosts", "slots"), [(3, 1), (2, 2)])
def test_hosts_send_what_is_simulated(tmp_path: Path, hosts: int, slots: int) -> None:
    line = [sys.executable, str(SCRIPT), "--hosts", str(hosts), "--slots", str(slots), "--seconds", "0.5"]
    line += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "found.json").read_text())["results"]
    for name in ("161 of ResNet-50", "one of 16 MiB"):
        assert result[name]["bytes"] == pytest.approx(result[name]["simulated bytes"], rel=0.02), name
