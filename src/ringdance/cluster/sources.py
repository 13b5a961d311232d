"""The hosts that are given to this process without a word from the user: by which scheduler, and how many."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringdance.cluster import slurm_env
from ringdance.cluster.hostfile import HostList, merge, parse_hostfile
from ringdance.errors import LaunchError

_PODS_START_S = 300.0


@dataclass(frozen=True)
class Allocation:
    """Hosts that a scheduler has given.

    Attributes:
        hosts: names and slots.
        source: who gave them, for people.
        way: how they are reached: "ssh" or "srun".
        ssh_arguments: what the scheduler wants ssh to be given.
        patience: seconds in which hosts may still be starting.
    """

    hosts: HostList
    source: str
    way: str = "ssh"
    ssh_arguments: Sequence[str] = ()
    patience: float = 0.0


def find(environ: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists) -> Allocation | None:
    """What the scheduler around this process has given; None on a plain machine.

    Args:
        environ: this process's environment.
        exists: whether there is such a file.

    Raises:
        LaunchError: what a scheduler says cannot be understood.
    """
    for source in (_pods, _sagemaker, _slurm, _lsf):
        found = source(environ, exists)
        if found:
            return found
    return None


_HOST_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)


def _pods(environ: Mapping[str, str], exists: Callable[[str], bool]) -> Allocation | None:
    """The launcher pod of an MPIJob or TrainJob: the operator names a host file of the workers."""
    slots = environ.get("OMPI_MCA_orte_set_default_slots") or environ.get("I_MPI_PERHOST") or "1"
    named = [(name, environ[name]) for name in _HOST_FILES if environ.get(name)]
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        named.append(("the MPIJob", "/etc/mpi/hostfile"))
    for name, path in named:
        if exists(path):
            hosts = parse_hostfile(path, name, int(slots) if slots.isdigit() else 1)
            arguments = [*_agent(environ), *shlex.split(environ.get("OMPI_MCA_plm_rsh_args", ""))]
            return Allocation(hosts, f"{path} (from {name})", "ssh", arguments, _PODS_START_S)
    return None


def _agent(environ: Mapping[str, str]) -> list[str]:
    """What the program that reaches the workers is given, if it is ssh."""
    name = "OMPI_MCA_plm_rsh_agent"
    program, *arguments = shlex.split(environ.get(name, "")) or ["ssh"]
    if os.path.basename(program) not in ("ssh", "rsh"):
        raise LaunchError(
            f"{name}={environ[name]}: this job reaches its workers by that program, as MPIJobs older than "
            "v2beta1 do. Here it is done by ssh: convert the manifest by `ringdance k8s convert FILE`"
        )
    return arguments


def _sagemaker(environ: Mapping[str, str], exists: Callable[[str], bool]) -> Allocation | None:
    """A SageMaker training container: the launcher is the first host of the list."""
    if not environ.get("SM_HOSTS") or "SM_CURRENT_HOST" not in environ:
        return None
    try:
        names = [str(name) for name in json.loads(environ["SM_HOSTS"])]
        given = json.loads(environ.get("SM_HPS") or "{}").get("sagemaker_mpi_num_of_processes_per_host")
        slots = int(given or environ.get("SM_NUM_GPUS") or 0) or 1
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"SM_HOSTS={environ['SM_HOSTS']}: not what SageMaker writes ({error})") from None
    return Allocation(merge((name, slots) for name in names), "SageMaker", patience=_PODS_START_S)


def _slurm(environ: Mapping[str, str], exists: Callable[[str], bool]) -> Allocation | None:
    hosts = slurm_env.hosts(environ)
    if hosts is None:
        return None
    way = "srun" if shutil.which("srun", path=environ.get("PATH")) else "ssh"
    return Allocation(hosts, f"Slurm job {environ.get('SLURM_JOB_ID') or environ.get('SLURM_JOBID')}", way)


def _lsf(environ: Mapping[str, str], exists: Callable[[str], bool]) -> Allocation | None:
    """LSF: ``LSB_MCPU_HOSTS="h1 4 h2 4"``, or a file with a name for each slot; batch nodes have no slots."""
    if "LSB_JOBID" not in environ:
        return None
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words and len(words) % 2 == 0 and all(word.isdigit() for word in words[1::2]):
        hosts = merge((name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True))
    elif exists(environ.get("LSB_DJOB_HOSTFILE", "")):
        hosts = parse_hostfile(environ["LSB_DJOB_HOSTFILE"], "LSB_DJOB_HOSTFILE", 1)
    elif environ.get("LSB_HOSTS"):
        hosts = merge((name, 1) for name in environ["LSB_HOSTS"].split())
    else:
        return None
    if len(hosts) > 1 and hosts[0][1] == 1 and ("batch" in hosts[0][0] or "login" in hosts[0][0]):
        hosts = hosts[1:]  # the node that only runs the job's script
    return Allocation(hosts, f"LSF job {environ['LSB_JOBID']}")
