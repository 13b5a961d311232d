"""A rank on another host dies: it is named first, and the others notice as they do on one host.

tests/hosts/test_first_failure.py repeats this many times, on hosts with their own networks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import here_hosts
import pytest
from processes import script
from sampled import sampled_rows

from ringdance.launch.mpi import find_mpi

pytestmark = [
    pytest.mark.limit(100),
    pytest.mark.skipif(bool(here_hosts.why_not()), reason=f"hosts: {here_hosts.why_not()}"),
    pytest.mark.skipif(find_mpi().family != "openmpi", reason="UCX treats hosts on one kernel as one"),
]
WORK = """
import os, sys
import numpy as np
import ringdance.numpy as rd
from ringdance.errors import RankLostError
rd.init()
try:
    for step in range(1000):
        if rd.rank() == 1 and step == 20:
            {death}
        rd.allreduce(np.ones(50), name="x")
except RankLostError:
    print("except", flush=True)
    raise
finally:
    print("finally", flush=True)
"""


DEATHS = [
    ("os.kill(os.getpid(), 15)", "killed by SIGTERM (signal 15)", 143),
    ("os._exit(0)", "exited with code 0 while other ranks were still running", 1),
]


@pytest.mark.parametrize(("death", "words", "code"), sampled_rows("deaths", DEATHS, 1))
def test_a_rank_that_dies_on_another_host_is_named_first(
    tmp_path: Path, death: str, words: str, code: int
) -> None:
    program = script(tmp_path, WORK.format(death=death))
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", "run", "--no-check", "-H", "localhost:1,other1:1,other2:1"]
        + ["python", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
        env=here_hosts.environment(tmp_path / "bin"),
    )
    first = next((line for line in done.stderr.splitlines() if line.startswith("first failure")), done.stderr)
    assert first.startswith("first failure: rank 1 of 3 on other1, pid "), done.stderr
    assert first.endswith(words)
    assert done.returncode == code
    assert sorted(line.partition("> ")[2] for line in done.stdout.splitlines()) == 2 * ["except"] + 2 * [
        "finally"
    ]
    assert done.stderr.count("RankLostError: rank 1 on host other1") == 2
    assert "fault tolerance" not in done.stderr
    assert "NBC_" not in done.stderr
