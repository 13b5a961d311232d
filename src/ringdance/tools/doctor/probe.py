"""Collect facts about this host: ``python -m ringdance.tools.doctor.probe``, started by the host's agent.

Standard input holds a JSON object on a line and stays open: the process ends with it. Its keys: ``probes``,
``usage``, ``seconds``, ``environ``. The facts follow :data:`MARK` on standard output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from ringdance.tools.doctor.check import Usage

MARK = "::ringdance-doctor::"

QUICK = {
    **dict.fromkeys(("machine", "environment", "cpu", "memory", "limits"), "machine"),
    **{name: name for name in ("disk", "python", "mpi", "network", "gpu", "leftovers")},
}
"""Modules of this package by probe, a function ``NAME_facts``; together they take at most seconds."""
PROBES = {**QUICK, "frameworks": "gpu", "world": "mpi"}
"""Also those that import frameworks, in processes of their own, or start ranks."""


def collect(probes: Iterable[str], usage: Usage, seconds: float) -> dict[str, Any]:
    """Run `probes` side by side; one that fails, or takes over `seconds`, gives ``{"failed": REASON}``."""
    found: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            # Imported here: a module whose libraries are missing leaves the others' facts alone.
            module = importlib.import_module(f"ringdance.tools.doctor.{PROBES[name]}")
            found[name] = getattr(module, f"{name}_facts")(usage)
        except Exception as error:  # any: machines in a bad state are the ones to examine
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


def _end_with_the_agent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_agent, daemon=True).start()
    os.environ.update(request.get("environ", {}))
    facts = collect(request["probes"], Usage(**request["usage"]), request["seconds"])
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
    os._exit(0)  # a thread may be inside a system call that never returns (a dead network disk)


if __name__ == "__main__":
    main()
