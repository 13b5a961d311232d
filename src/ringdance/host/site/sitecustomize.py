"""Python imports this when a rank starts, so that a failing script does not wait for peers in MPI_Finalize.

mpi4py finalizes MPI when the interpreter exits, even after an uncaught exception or ``sys.exit(1)``. The
peers would then wait for the failed rank, and it would wait for them. This module exits without finalizing
instead, so that mpiexec ends the job. It does so only in the rank itself, not in its children. A user's
``sitecustomize`` is imported too. Scripts that use the engine are unaffected, because the engine stops the
job itself.
"""

import atexit
import importlib.util
import json
import os
import stat
import sys
import time
import types

_FRAMEWORKS = ("torch", "tensorflow", "jax", "keras", "tf_keras", "mxnet", "ringdance.numpy")
# Modules that connect ranks in another way, or might do so. If any of them is loaded, nothing is reported.
_OTHERS = (
    "mpi4py.MPI", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "ray", "torch.distributed.run",
)


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
    sys.modules.setdefault(__name__, own)  # the import system expects this module here


def _has_joined_otherwise() -> bool:
    """Return True if this process joined others through its framework, even if it has left them since."""
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    jax = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    tensorflow = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return (
        any(name in sys.modules for name in _OTHERS)
        or ("horovod" in sys.modules and "ringdance" not in sys.modules)
        or "TF_CONFIG" in os.environ
        or getattr(torch, "_backend", None) is not None
        or getattr(jax, "coordinator_address", None) is not None
        or getattr(tensorflow, "_server_def", None) is not None
        or getattr(tensorflow, "_collective_ops_server_def", None) is not None
    )


def _tell_of_training_alone(mark: str) -> None:
    """Tell the launcher that this rank has used a framework without ``init()`` or anything similar.

    Args:
        mark: ``exit_code.CAUSE_MARK``.
    """
    used = [name for name in _FRAMEWORKS if name in sys.modules]
    number = int(os.environ["RINGDANCE_RANK"])
    joined = os.path.exists(f"{os.environ['RINGDANCE_JOB_DIRECTORY']}/joined.{number}")  # by session.init
    first = os.getpgrp() == os.getpid()  # if not, a shell started this process, and may start one that joins
    reads = stat.S_ISFIFO(os.fstat(2).st_mode)  # True if the launcher reads this process's stderr
    if used and first and reads and not joined and not _has_joined_otherwise():
        cause = {"rank": number, "kind": "alone", "message": used[0]}
        line = json.dumps({**cause, "host": os.uname().nodename, "pid": os.getpid(), "time": time.time()})
        os.write(2, f"{mark} {line}\n".encode())


def _exit_code_module() -> types.ModuleType:
    """Load exit_code.py by its path, independently of the ``ringdance`` that the script may import."""
    name, path = "ringdance.host.exit_code", os.path.join(os.path.dirname(__file__), "..", "exit_code.py")
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def _watch() -> None:
    former, pid, failed, codes = sys.excepthook, os.getpid(), [], _exit_code_module()
    codes.watch()

    def note(*caught) -> None:  # type: ignore[no-untyped-def]
        failed.append(caught)
        former(*caught)

    def leave() -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        try:
            if os.getpid() == pid and not failed:
                _tell_of_training_alone(codes.CAUSE_MARK)
        except Exception:  # the script may have modified its modules in any way
            pass
        code = 1 if failed else codes.exit_code()
        if not code or os.getpid() != pid or mpi is None:
            return
        if mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    sys.excepthook = note
    atexit.register(leave)  # registered first, so it is called last


_import_the_next()
_watch()
