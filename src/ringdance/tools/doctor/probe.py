"""Collect facts about this host: ``python -m ringdance.tools.doctor.probe``, started by the host's agent.

Standard input receives one line with a JSON object with the keys ``probes``, ``usage``, ``seconds`` and
``environ``. It then stays open, and the process exits when it closes. The facts follow ``MARK`` on standard
output.
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
"""The module of this package with each probe, a function ``NAME_facts``. All take seconds at most."""
PROBES = {**QUICK, "frameworks": "gpu", "world": "mpi"}
"""All probes: the quick ones, and those that import frameworks in separate processes or start ranks."""


def collect(probes: Iterable[str], usage: Usage, seconds: float) -> dict[str, Any]:
    """Run ``probes`` in parallel. One that fails or exceeds ``seconds`` gives ``{"failed": REASON}``."""
    facts: dict[str, Any] = {}

    def run_probe(name: str) -> None:
        try:
            # Imported here, so that a module with missing libraries does not affect the other probes.
            module = importlib.import_module(f"ringdance.tools.doctor.{PROBES[name]}")
            facts[name] = getattr(module, f"{name}_facts")(usage)
        except Exception as error:  # any error is possible: the doctor examines machines in a bad state
            facts[name] = {"failed": f"{type(error).__name__}: {error}"}

    threads = {name: threading.Thread(target=run_probe, args=(name,), daemon=True) for name in probes}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            facts.setdefault(name, {"failed": f"not finished after {seconds:g} s"})
    return dict(facts)


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
    os._exit(0)  # do not wait for threads: one may be in a system call that never returns (dead network disk)


if __name__ == "__main__":
    main()
