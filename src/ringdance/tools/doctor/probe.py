"""Collect facts about this host. The host's agent starts ``python -m ringdance.tools.doctor.probe``.

The agent writes a JSON object with the keys ``probes``, ``usage``, ``seconds`` and ``environ`` to standard
input, on a single line. It keeps standard input open: when standard input is closed, this process exits. The
process writes ``MARK`` and then the facts as JSON to standard output.
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
"""Fast probes and the modules that define their ``NAME_facts``. Each probe takes at most a few seconds."""
PROBES = {**QUICK, "frameworks": "gpu", "world": "mpi"}
"""All probes, including slow ones that import frameworks in separate processes or start ranks."""


def collect(probes: Iterable[str], usage: Usage, seconds: float) -> dict[str, Any]:
    """Run ``probes`` in parallel. A probe that fails or times out yields ``{"failed": REASON}``."""
    facts: dict[str, Any] = {}

    def run_probe(name: str) -> None:
        try:
            # Import the module here, so that a missing dependency makes only this probe fail.
            module = importlib.import_module(f"ringdance.tools.doctor.{PROBES[name]}")
            facts[name] = getattr(module, f"{name}_facts")(usage)
        except Exception as error:  # if the machine is broken, any kind of exception is possible
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
    """Run the probes requested on standard input and print the facts."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_agent, daemon=True).start()
    os.environ.update(request.get("environ", {}))
    facts = collect(request["probes"], Usage(**request["usage"]), request["seconds"])
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
    # Exit without joining threads, because one may be blocked forever, for example on a dead NFS mount.
    os._exit(0)


if __name__ == "__main__":
    main()
