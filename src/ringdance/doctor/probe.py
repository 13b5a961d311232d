"""Facts about this machine: ``python -m ringdance.doctor.probe`` prints them as JSON, here or over ssh.

Standard input holds what is asked: ``{"probes": [...], "wanted": {...}, "seconds": S,
"environ": {...}}``. The line with the facts begins with :data:`MARK`, since login shells may print other
things before it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from ringdance.doctor.registry import Wanted

MARK = "::ringdance-facts::"

QUICK = (
    "machine", "cpu", "memory", "limits", "disk", "python", "mpi", "environment", "network", "ssh", "gpu",
    "leftovers", "slurm",
)  # fmt: skip
"""Probes that take less than some seconds together; each is a module of ``ringdance.doctor.probes``."""
SLOW = ("frameworks", "world")
"""Probes that import frameworks, in processes of their own, or start ranks."""
PROBES = (*QUICK, *SLOW)


def look(probes: Iterable[str], wanted: Wanted, seconds: float) -> dict[str, Any]:
    """Run `probes` side by side; one that fails, or is not ready after `seconds`, says so in its place."""
    found: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            found[name] = importlib.import_module(f"ringdance.doctor.probes.{name}").look(wanted)
        except Exception as error:  # any: a machine in a bad state is what this is for
            found[name] = {"failed": f"{type(error).__name__}: {error}"}

    threads = {name: threading.Thread(target=one, args=(name,), daemon=True) for name in probes}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            found.setdefault(name, {"failed": f"not ready after {seconds:g} s"})
    return dict(found)


_LIBRARIES = (
    "LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "I_MPI_ROOT", "MPI4PY_LIBMPI", "MPI4PY_MPIABI",
)  # fmt: skip
"""Where libraries are: a job's ranks get these of the launcher's, whatever a host's own login sets."""


def request(probes: Iterable[str], wanted: Wanted, seconds: float) -> bytes:
    """What to write to the standard input of a probe process."""
    asked = {"probes": list(probes), "wanted": dataclasses.asdict(wanted), "seconds": seconds}
    asked["environ"] = {name: os.environ[name] for name in _LIBRARIES if name in os.environ}
    return json.dumps(asked).encode()


def read_wanted(values: dict[str, Any]) -> Wanted:
    """The other way round of ``dataclasses.asdict``, after JSON has made lists of tuples."""
    found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Wanted(**found)


def main() -> None:
    """Answer one request, and end even if a probe hangs."""
    asked = json.loads(sys.stdin.buffer.read())
    os.environ.update(asked.get("environ", {}))
    began = time.time()
    found = look(asked["probes"], read_wanted(asked["wanted"]), asked["seconds"])
    found["times"] = {"began": began, "ended": time.time()}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
    os._exit(0)  # a thread may be inside a system call that never returns (a dead network disk)


if __name__ == "__main__":
    main()
