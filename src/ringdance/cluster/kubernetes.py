"""Hosts of an MPIJob or TrainJob on Kubernetes, read in its launcher pod."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping

from ringdance.cluster.allocation import CONTAINERS_START_S, Allocation
from ringdance.cluster.hostfile import parse_hostfile
from ringdance.errors import LaunchError

_HOST_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_AGENT = "OMPI_MCA_plm_rsh_agent"


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the host file of the workers that the operator has put into the pod."""
    slots = environ.get("OMPI_MCA_orte_set_default_slots") or environ.get("I_MPI_PERHOST") or "1"
    files = [(name, environ[name]) for name in _HOST_FILES if environ.get(name)]
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        files.append(("the MPIJob", "/etc/mpi/hostfile"))
    in_pod = environ.get("K_MPI_JOB_ROLE") == "launcher" or "KUBERNETES_SERVICE_HOST" in environ
    for name, path in files:
        if os.path.exists(path):
            hosts = parse_hostfile(path, name, int(slots) if slots.isdigit() else 1)
            arguments = [*_ssh_arguments(environ), *shlex.split(environ.get("OMPI_MCA_plm_rsh_args", ""))]
            pods = {host.partition(".")[0] for host, _ in hosts}
            return Allocation(
                hosts, f"{path} (from {name})", "ssh", arguments, CONTAINERS_START_S,
                unattended=in_pod, outside=in_pod and socket.gethostname().partition(".")[0] not in pods,
            )  # fmt: skip
    return None


def _ssh_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return the arguments that the operator gives the remote shell, which must be ssh."""
    program, *arguments = shlex.split(environ.get(_AGENT, "")) or ["ssh"]
    if os.path.basename(program) not in ("ssh", "rsh"):
        raise LaunchError(
            f"{_AGENT}={environ[_AGENT]}: this job reaches its workers by that program, as MPIJobs older "
            "than v2beta1 do. Ringdance uses ssh: change the manifest as docs/howto/kubernetes.md shows "
            "(An old MPIJob)"
        )
    return arguments
