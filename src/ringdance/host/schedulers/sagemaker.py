"""Detect the hosts of a SageMaker training job. Runs in the job's first container."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ringdance.errors import LaunchError
from ringdance.host.schedulers.allocation import CONTAINERS_START_S, Allocation
from ringdance.host.schedulers.hostfile import merge

STAYS = ""  # the toolkit sets the same values on all hosts, except for SM_CURRENT_HOST
_START = "its MPI: processes_per_host (--processes-per-host), or distribution={'mpi': {'enabled': True}}"


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the hosts from the variables that SageMaker's toolkit sets."""
    if not environ.get("SM_HOSTS") or "SM_CURRENT_HOST" not in environ:
        return None
    try:
        names = [str(name) for name in json.loads(environ["SM_HOSTS"])]
        # SM_FRAMEWORK_PARAMS holds only the request's hyperparameters named sagemaker_*.
        settings = json.loads(environ.get("SM_FRAMEWORK_PARAMS") or "{}")
        ranks = settings.get("sagemaker_mpi_num_of_processes_per_host")
        slots = int(ranks or environ.get("SM_NUM_GPUS") or 0) or 1
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"cannot parse SageMaker's variables (SM_HOSTS={environ['SM_HOSTS']}): {error}"
        ) from None
    here, refused = environ["SM_CURRENT_HOST"], ""
    if here not in names[:1]:  # without MPI, SageMaker runs the script on every host
        refused = (
            f"this is {here} of {', '.join(names)}: SageMaker runs the script on each host, and each run "
            f"would start ranks on all hosts. Let SageMaker start the ranks with {_START}"
        )
    hosts = merge((name, slots) for name in names)
    return Allocation(hosts, "SageMaker", start_timeout=CONTAINERS_START_S, refused=refused, start=_START)
