"""Facts of several hosts: the agent on each runs the probes in a process of its own (``probe.py``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.doctor.probe import MARK
from ringdance.doctor.probes.files import last_line
from ringdance.hosts.host_set import HostSet
from ringdance.launch.remote.shell import RemoteShell

_SPARE_S = 30.0  # for starting Python, beyond the limit of the probes
_NAMES = 16  # of other hosts, that a host resolves
# Where libraries are: a job's ranks get these of the launcher's, whatever a host's own login sets.
_LIBRARIES = (
    "LD_LIBRARY_PATH", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "I_MPI_ROOT", "MPI4PY_LIBMPI", "MPI4PY_MPIABI",
)  # fmt: skip


def collect(
    hosts: HostSet, probes: Collection[str], usage: Usage, seconds: float
) -> dict[str, dict[str, Any]]:
    """Return the facts of each host, of all at once; only "reach" of one that does not answer.

    Args:
        hosts: Connected hosts, and the problems of the others.
        probes: Names of the probes.
        usage: What the hosts are to be used for.
        seconds: Limit for the probes.
    """
    request = {
        "probes": list(probes),
        "seconds": seconds,
        "environ": {name: os.environ[name] for name in _LIBRARIES if name in os.environ},
    }
    messages = {}
    for host in hosts.names:
        own = asdict(replace(usage, hosts=_sample(usage.hosts, host)))
        messages[host] = {"task": "probe", "request": {**request, "usage": own}}
    answers = hosts.ask(messages, timeout=seconds + _SPARE_S)
    return {host: _facts(host, answer, hosts.shell) for host, answer in answers.items()}


def _sample(hosts: Sequence[str], host: str) -> tuple[str, ...]:
    """Return the names that a host resolves: those after its own, so that several hosts resolve each."""
    at = hosts.index(host) if host in hosts else 0
    return tuple([*hosts, *hosts][at : at + min(len(hosts), _NAMES + 1)])


def _facts(host: str, answer: Mapping[str, Any], shell: RemoteShell) -> dict[str, Any]:
    """Return the facts in the answer of a host's agent."""
    output = answer.get("output", "")
    try:
        found = json.JSONDecoder().raw_decode(output.rpartition(MARK)[2])[0]
    except ValueError:
        # The launcher's messages end with the fix, in a sentence of its own.
        problem, dot, fix = answer["problem"].rpartition(". ")
        way = "" if host in shell.local else f"ssh {host} "
        fix = fix if dot else f"see what it says: {way}{sys.executable} -m ringdance doctor"
        error = problem or answer["problem"] or f"the probes fail: {last_line(output)}"
        return {"reach": {"error": error, "fix": fix}}
    return {**found, "reach": {"error": "", "local": host in shell.local}}
