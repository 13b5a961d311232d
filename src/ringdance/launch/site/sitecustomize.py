"""Python imports this when a rank starts: a script that fails must not wait for peers in MPI_Finalize.

mpi4py finalizes MPI when the interpreter ends, also after an uncaught exception; the peers wait for
the rank that failed, and it waits for them. Here the process ends without finalizing, so that mpiexec ends
the job. Only in the rank itself, not in its children. A ``sitecustomize`` of the user's is imported too.
Scripts that use the engine are not concerned: it stops the job by itself.
"""

import atexit
import importlib
import json
import os
import re
import sys
import time

_FRAMEWORKS = ("torch", "tensorflow", "jax", "keras", "tf_keras", "mxnet", "ringdance.numpy")
# What joins ranks in another way, or may: then nothing is said.
_OTHERS = ("mpi4py.MPI", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "ray")
_DISTRIBUTED = re.compile("(?i)distribut")  # torch.distributed, tf.distribute, jax.distributed
# In a script that imports Ringdance, where the word is common: what joins ranks without it.
_BESIDE = re.compile(
    r"init_process_group|DistributedDataParallel|fully_shard|\b(tf|tensorflow|jax|keras)\.distribut"
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
    sys.modules.setdefault(__name__, own)  # the importer of this module looks for it


def _tell_of_training_alone() -> None:
    """Tell the launcher that this rank has used a framework, without ``init()`` or anything like it."""
    used = [name for name in _FRAMEWORKS if name in sys.modules]
    session = sys.modules.get("ringdance.session")
    joined = session is not None and session._process.pid
    if not used or joined or any(name in sys.modules for name in _OTHERS):
        return
    loaded = [(name.split(".")[0], module) for name, module in list(sys.modules.items())]
    modules = [module for package, module in loaded if package not in ("ringdance", "horovod")]
    files = [getattr(module, "__file__", None) or "" for module in modules]
    library = (os.path.dirname(os.__file__), sys.prefix, sys.base_prefix, os.path.dirname(__file__))
    try:
        own = [one for one in files if os.path.isabs(one) and not one.startswith(library)]
        for name in (sys.argv[0], *own):
            with open(name, encoding="utf-8", errors="replace") as file:
                if (_BESIDE if session else _DISTRIBUTED).search(file.read()):
                    return
        found = {"rank": int(os.environ["RINGDANCE_RANK"]), "kind": "alone", "message": used[0]}
        line = json.dumps({**found, "host": os.uname().nodename, "pid": os.getpid(), "time": time.time()})
        print(f"::ringdance-cause:: {line}", file=sys.stderr, flush=True)
    except (AttributeError, OSError, KeyError, ValueError, TypeError):
        pass


def _watch() -> None:
    former, pid, failed = sys.excepthook, os.getpid(), []

    def note(*caught) -> None:  # type: ignore[no-untyped-def]
        failed.append(caught)
        former(*caught)

    def leave() -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        if os.getpid() == pid and not failed:
            _tell_of_training_alone()
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
