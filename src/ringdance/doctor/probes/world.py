"""Two ranks, started as `ringdance run` would start them: whether they are one world."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.errors import LaunchError
from ringdance.launch.hosts import Host
from ringdance.launch.mpi import find_mpi
from ringdance.launch.mpi.options import MpiexecRequest, mpiexec_options

# One write for each rank: two ranks' lines must not mix.
_RANK = "import os; from mpi4py import MPI; os.write(1, f'size={MPI.COMM_WORLD.Get_size()}\\n'.encode())"
_LIMIT_S = 60.0


def collect(usage: Usage) -> dict[str, Any]:
    """Sizes of the world as the two ranks see it; exit code and errors; the command line."""
    try:
        mpi = find_mpi()
    except LaunchError as error:
        return {"failed": str(error)}
    hosts = [Host("localhost", 2, (0, 1), local=True)]
    options, variables = mpiexec_options(MpiexecRequest(mpi, hosts, root=os.getuid() == 0))
    words = [mpi.mpiexec, *options, "-n", "2", sys.executable, "-P", "-c", _RANK]
    code, output, errors = files.run(words, _LIMIT_S, {**os.environ, **variables})
    sizes = [int(line[5:]) for line in output.splitlines() if line.startswith("size=") and line[5:].isdigit()]
    return {"sizes": sizes, "code": code, "errors": files.last_line(errors), "line": shlex.join(words)}
