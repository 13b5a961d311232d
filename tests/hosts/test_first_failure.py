"""A rank dies on one of three hosts: it is named first, with its cause and code, and the others clean up."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hosts import Hosts, wait_until

from ringdance.launch.mpi import find_mpi

pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.skipif(find_mpi().family != "openmpi", reason="MPICH's UCX crashes after a peer has died"),
]
RUN = (sys.executable, "-m", "ringdance", "run", "--no-check")
LAYOUTS = ("h1:2,h2:1,h3:1", "h1:1,h2:2,h3:3")
# How rank 2 dies, how that is reported, and the job's exit code.
DEATHS = {
    "kill": ("os.kill(os.getpid(), 9)", r"killed by SIGKILL \(signal 9\)", 128 + signal.SIGKILL),
    "term": ("os.kill(os.getpid(), 15)", r"killed by SIGTERM \(signal 15\)", 128 + signal.SIGTERM),
    "abort": ("os.abort()", r"killed by SIGABRT \(signal 6\)", 128 + signal.SIGABRT),
    "exit 0": ("os._exit(0)", "exited with code 0 while other ranks were still running", 1),
    "exit 3": ("os._exit(3)", "exited with code 3", 3),
}
WORK = """
import os, time
import numpy as np
import ringdance.numpy as rd
from ringdance.errors import RankLostError
rd.init()
try:
    for step in range(400):
        if rd.rank() == 2 and step == {step}:
            {death}
        rd.allreduce(np.ones({count}), name="x")
        time.sleep({pause})
except RankLostError:
    print("except", flush=True)
    raise
finally:
    print("finally", flush=True)
"""


IN_INIT = """
import os
import ringdance.numpy as rd
from ringdance.core.transport.mpi import MpiTransport
hierarchy = MpiTransport.hierarchy
def die_there(self):
    if self.rank == 2:
        os.kill(os.getpid(), 9)
    return hierarchy(self)
MpiTransport.hierarchy = die_there
rd.init()
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_died_during_init(three_hosts: Hosts, tmp_path: Path, layout: str) -> None:
    (tmp_path / "work.py").write_text(IN_INIT)
    done = three_hosts.run("h1", *RUN, "-H", layout, "python", str(tmp_path / "work.py"))
    assert re.search(r"first failure: rank 2 of \d on h[23], pid \d+: killed by SIGKILL", done.stderr)
    assert done.returncode == 137
    # (Ranks that notice late may see that others have left since.)
    assert re.search(
        r"then rank \d .*RankLostError: ranks? [\d, ]*\d died during startup", done.stderr
    )
    assert "MemoryError" not in done.stderr


@pytest.mark.parametrize("trial", range(int(os.environ.get("KILL_TRIALS", "6"))))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("death", DEATHS)
def test_who_died(three_hosts: Hosts, tmp_path: Path, death: str, layout: str, trial: int) -> None:
    do, words, code = DEATHS[death]
    program = tmp_path / "work.py"
    count, pause = (50, 0.01) if trial % 2 else (300_000, 0.0)
    program.write_text(WORK.format(step=5 + 7 * trial % 350, death=do, count=count, pause=pause))
    done = three_hosts.run("h1", *RUN, "-H", layout, "python", str(program))
    assert re.search(rf"first failure: rank 2 of \d on h[23], pid \d+: {words}", done.stderr), done.stderr
    assert done.returncode == code, done.stderr
    others = sum(int(count) for count in re.findall(r":(\d)", layout)) - 1
    told = done.stdout + done.stderr
    assert done.stdout.count("> except\n") == done.stdout.count("> finally\n") == others, told
    assert "first failure: rank" not in done.stderr.partition("\nthen rank")[2]
    assert "fault tolerance" not in done.stderr
    assert "NBC_Progress" not in done.stderr
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = [line for name in three_hosts.names for line in three_hosts.leftovers(name)]
        return not left

    assert wait_until(nothing_left, 10.0) is not None, left
