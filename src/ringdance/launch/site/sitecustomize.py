"""Python imports this when a rank starts: a script that fails must not wait for peers in MPI_Finalize.

mpi4py finalizes MPI when the interpreter ends, also after an uncaught exception; the peers wait for
the rank that failed, and it waits for them. Here the process ends without finalizing, so that mpiexec ends
the job. Only in the rank itself, not in its children. A ``sitecustomize`` of the user's is imported too.
Scripts that use the engine are not concerned: it stops the job by itself.
"""

import atexit
import importlib
import os
import sys


def _import_the_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != here]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    if not any(kept):
        del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != here]
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    sys.modules.setdefault(__name__, own)  # the importer of this module looks for it


def _watch() -> None:
    former, pid, failed = sys.excepthook, os.getpid(), []

    def note(*caught) -> None:  # type: ignore[no-untyped-def]
        failed.append(caught)
        former(*caught)

    def leave() -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        if not failed or os.getpid() != pid or mpi is None:
            return
        if mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = note
    atexit.register(leave)  # the first that is registered is the last that is called


_import_the_next()
_watch()
