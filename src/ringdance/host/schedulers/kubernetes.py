"""Detect the hosts of a Kubernetes MPIJob or TrainJob. Runs in the launcher pod."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from ringdance.errors import LaunchError
from ringdance.host.schedulers.allocation import CONTAINERS_START_S, Allocation
from ringdance.host.schedulers.hostfile import parse_hostfile

_HOST_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_AGENT = "OMPI_MCA_plm_rsh_agent"
STAYS = r"KUBERNETES_.*|.*_SERVICE_(HOST|PORT)(_.*)?|.*_PORT_\d+_(TCP|UDP).*|K_MPI_JOB_ROLE"
"""Pattern for the names of variables that describe a single pod. They are not forwarded to other hosts."""


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the workers' host file, which the operator mounts in the pod."""
    slots = environ.get("OMPI_MCA_orte_set_default_slots") or environ.get("I_MPI_PERHOST") or "1"
    files = [(name, environ[name]) for name in _HOST_FILES if environ.get(name)]
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        files.append(("the MPIJob", "/etc/mpi/hostfile"))
    in_pod = environ.get("K_MPI_JOB_ROLE") == "launcher" or "KUBERNETES_SERVICE_HOST" in environ
    for name, path in files:
        if os.path.exists(path):
            hosts = parse_hostfile(path, name, int(slots) if slots.isdigit() else 1)
            arguments = [*_ssh_arguments(environ), *_words(environ, "OMPI_MCA_plm_rsh_args")]
            where = f"{path} (from {name})"
            return Allocation(
                hosts, where, "ssh", arguments, CONTAINERS_START_S, unattended=in_pod, maybe_outside=in_pod
            )
    return None


def _words(environ: Mapping[str, str], name: str) -> list[str]:
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise LaunchError(f"{name}={environ[name]}: {error}") from None


def _ssh_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return the arguments that the operator sets for the remote shell, which must be ssh."""
    program, *arguments = _words(environ, _AGENT) or ["ssh"]
    if os.path.basename(program) not in ("ssh", "rsh"):
        raise LaunchError(
            f"{_AGENT}={environ[_AGENT]}: MPIJobs older than v2beta1 reach their workers through it, but "
            "Ringdance needs ssh. Change the manifest as shown in docs/howto/clusters/kubernetes.md, "
            "section 'An old MPIJob'"
        )
    return arguments
