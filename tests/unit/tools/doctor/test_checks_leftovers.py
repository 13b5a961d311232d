"""Checks of what earlier jobs leave behind. Processes of the test really leave it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from breaking import Machine, breaks, wrong

from ringdance.host.system import linux


@breaks("orphans")
def test_a_rank_whose_launcher_is_gone() -> None:
    if not linux.LINUX:
        pytest.skip("needs /proc")
    environ = {**os.environ, linux.MARKER: "d0c70123"}
    # Runs in the background of a shell that exits. Its parent is then init or a subreaper.
    done = subprocess.run(
        ["setsid", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo "
                               "$!"], env=environ, capture_output=True, check=True,
    )  # fmt: skip
    pid = int(done.stdout)
    try:
        facts = Machine().facts(["leftovers"])
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != 1:
            pytest.skip("a process other than init adopts orphans here")
        assert any(f"sleep {pid}" in result.text for result in wrong("orphans", facts)), facts
    finally:
        os.kill(pid, signal.SIGKILL)
