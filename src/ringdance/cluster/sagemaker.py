"""Hosts of a SageMaker training job, read in its first container."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ringdance.cluster.allocation import CONTAINERS_START_S, Allocation
from ringdance.cluster.hostfile import merge
from ringdance.errors import LaunchError


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the hosts from the variables that SageMaker's toolkit sets."""
    if not environ.get("SM_HOSTS") or "SM_CURRENT_HOST" not in environ:
        return None
    try:
        names = [str(name) for name in json.loads(environ["SM_HOSTS"])]
        given = json.loads(environ.get("SM_HPS") or "{}").get("sagemaker_mpi_num_of_processes_per_host")
        slots = int(given or environ.get("SM_NUM_GPUS") or 0) or 1
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"SM_HOSTS={environ['SM_HOSTS']}: not what SageMaker writes ({error})") from None
    return Allocation(merge((name, slots) for name in names), "SageMaker", start_timeout=CONTAINERS_START_S)
