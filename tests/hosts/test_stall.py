"""A rank on another host cannot respond, so another rank on that host examines it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosts import Hosts, wait_until

pytestmark = pytest.mark.limit(120)
PROGRAM = """
import re
import numpy as np, ringdance.numpy as hvd
hvd.init()
hvd.barrier()
def stuck():
    re.match("(a+)+$", "a" * 60 + "b")  # for centuries
if hvd.rank() == 1:
    stuck()
hvd.barrier()
"""


def test_the_line_of_a_rank_that_holds_pythons_lock(three_hosts: Hosts, tmp_path: Path) -> None:
    script, out = tmp_path / "stuck.py", tmp_path / "out"
    script.write_text(PROGRAM)
    line = [sys.executable, "-m", "ringdance", "run", "-H", "h1:1,h2:2", "--output-filename", str(out)]
    log = tmp_path / "log"
    job = three_hosts.start("h1", *line, "python", str(script), log=log)
    try:
        assert wait_until(lambda: "stall-rank0" in log.read_text(), 60.0) is not None, log.read_text()
    finally:
        three_hosts.end(job)
    warning = next(text for text in log.read_text().splitlines() if " has waited " in text)
    assert "No answer from rank 1 on host h2 (pid " in warning
    assert "its main thread computes, probably in a call that holds the GIL" in warning
    assert f"at {script}:7 in stuck" in warning
    assert "line 7 in stuck" in next(out.glob("ringdance-stacks-rank1-*.txt")).read_text()
