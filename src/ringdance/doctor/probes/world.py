"""Two ranks, started as `ringdance run` would start them: whether they are one world."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probes import files
from ringdance.errors import LaunchError
from ringdance.launch.mpi import find_mpi

# One write for each rank: two ranks' lines must not mix.
_RANK = "import os; from mpi4py import MPI; os.write(1, f'size={MPI.COMM_WORLD.Get_size()}\\n'.encode())"
_LIMIT_S = 60.0


def collect(usage: Usage) -> dict[str, Any]:
    """Sizes of the world as the two ranks see it; exit code and errors; the command line."""
    try:
        mpi = find_mpi()
    except LaunchError as error:
        return {"failed": str(error)}
    environ = dict(os.environ)
    environ |= {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native", "OMPI_MCA_btl": "self,sm"}
    words = [mpi.mpiexec, "-n", "2"]
    if mpi.family == "openmpi":
        words[1:1] = ["--oversubscribe", "--bind-to", "none"]
        if os.getuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words += [sys.executable, "-P", "-c", _RANK]
    code, output, errors = files.run(words, _LIMIT_S, environ)
    sizes = [int(line[5:]) for line in output.splitlines() if line.startswith("size=") and line[5:].isdigit()]
    return {"sizes": sizes, "code": code, "errors": files.last_line(errors), "line": shlex.join(words)}
