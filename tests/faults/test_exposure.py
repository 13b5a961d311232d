"""What a running job exposes: which sockets listen, and for whom. Received data are not unpickled."""

from __future__ import annotations

import stat
from pathlib import Path

import exposure
import pytest
from processes import by_main, script, start, wait_until

from ringdance.launch.mpi import find_mpi

NO_PICKLES = """
import pickle

def refuse(*arguments, **options):
    raise AssertionError("something heard over MPI was unpickled")

pickle.loads = pickle.load = pickle.Unpickler = refuse
from mpi4py import MPI
MPI.pickle.__init__(pickle.dumps, refuse)
import numpy as np
import ringdance.numpy as rd
from ringdance import errors as rd_errors
rd.init()
rank, size = rd.rank(), rd.size()
assert rd.allreduce(np.full(4, rank), op=rd.Sum, name="sum")[0] == 3
assert len(rd.allgather(np.ones(rank + 1), name="rows")) == 6
try:
    rd.allreduce(np.ones(2 + rank), name="of another shape")
except rd_errors.MismatchError as error:
    assert "Mismatched shapes" in str(error), error
else:
    raise SystemExit("no mismatch")
pair = rd.add_process_set([np.int64(0), 1])
if rank < 2:
    assert rd.allreduce(np.ones(3), op=rd.Sum, process_set=pair, name="in a set")[0] == 2
rd.remove_process_set(pair)
print("all done")
"""


def test_the_engine_unpickles_nothing(tmp_path: Path) -> None:
    done = by_main("run", "-np", "3", "python", script(tmp_path, NO_PICKLES))
    assert done.stdout.count("all done") == 3, done.stderr


WAITING = """
import os, sys, time
import numpy as np
import ringdance.numpy as rd
rd.init()
rd.allreduce(np.ones(4), name="start")
open(f"{sys.argv[1]}.{rd.rank()}", "w").close()
while os.path.exists(sys.argv[1]): time.sleep(0.02)
rd.allreduce(np.ones(4), name="end")
"""


@pytest.mark.skipif(find_mpi().family != "openmpi", reason="the table is about Open MPI")
def test_a_job_on_one_host_listens_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "wait"
    path.touch()
    job = start(tmp_path, "-np", "2", "python", script(tmp_path, WAITING), str(path))
    try:
        assert wait_until(lambda: all(Path(f"{path}.{rank}").exists() for rank in (0, 1)), 30.0) is not None
        result, ports = exposure.listening(process.pid for process in job.processes())
        assert result == exposure.documented(several=False)
        assert not ports, "ports are open to the network"
        (name,) = job.ids
        words = Path("/proc/net/unix").read_text().split()
        directories = {Path(word).parent for word in words if f"/ringdance-{name[:12]}-" in word}
        assert [stat.S_IMODE(directory.stat().st_mode) for directory in directories] == [0o700]
        path.unlink()
        assert job.process.wait(30.0) == 0
    finally:
        job.end()
