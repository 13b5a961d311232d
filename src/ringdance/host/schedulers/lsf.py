"""Detect the hosts of an LSF job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ringdance.host.schedulers.allocation import Allocation
from ringdance.host.schedulers.hostfile import merge, parse_hostfile

STAYS = "LSB_.*|LSF_.*|LS_.*"
"""Pattern for the names of variables that describe a single process. They are not forwarded."""


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the hosts from ``LSB_MCPU_HOSTS="h1 4 h2 4"``, a host file (a name per slot), or ``LSB_HOSTS``."""
    if "LSB_JOBID" not in environ:
        return None
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words and len(words) % 2 == 0 and all(word.isdigit() for word in words[1::2]):
        hosts = merge((name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True))
    elif os.path.exists(environ.get("LSB_DJOB_HOSTFILE", "")):
        hosts = parse_hostfile(environ["LSB_DJOB_HOSTFILE"], "LSB_DJOB_HOSTFILE", 1)
    elif names := environ.get("LSB_HOSTS", "").split():
        hosts = merge((name, 1) for name in names)
    else:
        return None
    first, *others = hosts
    batch = first[1] == 1 and ("batch" in first[0] or "login" in first[0])
    if batch and others and all(slots > 1 for _, slots in others):
        hosts = others  # the batch node only runs the batch script
    job = f"LSF job {environ['LSB_JOBID']}"
    return Allocation(hosts, job, unattended="LSB_INTERACTIVE" not in environ)
