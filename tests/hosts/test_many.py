"""More hosts than the usual limit of open files allows. Their agents are processes of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "many_hosts.py"
HOSTS = 500
pytestmark = [
    pytest.mark.limit(400),
    pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare (util-linux)"),
]


def run(limit: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(BENCHMARK), *words]
    return subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *line], capture_output=True, text=True, check=False
    )


def test_a_command_on_more_hosts_than_the_soft_limit_of_open_files_allows(tmp_path: Path) -> None:
    done = run("-Sn 1024", "--hosts", str(HOSTS), "--json", str(tmp_path / "found"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "found").read_text())
    assert report["hosts"] == HOSTS
    assert report["agents"] < HOSTS * 20 * 2**20
    assert report["launcher"] < 100 * 2**20


def test_the_hard_limit_of_open_files_is_told_with_the_number_that_is_needed() -> None:
    done = run("-n 1024", "--hosts", str(HOSTS))
    assert done.returncode == 1
    assert "this process needs 15" in done.stderr
    assert f"open files for {HOSTS} hosts" in done.stderr
    assert "its hard limit is 1024" in done.stderr
