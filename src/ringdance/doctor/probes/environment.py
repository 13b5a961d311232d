"""The environment that a script started from this shell would have: only variables of a list are read."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.errors import SettingError
from ringdance.settings import SettingWarning, load

NAMES = (
    # threads
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    # devices and networks
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "UCX_NET_DEVICES", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "UCX_TLS",
    "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include", "OMPI_MCA_btl",
    "OMPI_MCA_osc", "OMPI_MCA_pml", "HOROVOD_GLOO_IFACE", "MASTER_ADDR", "MASTER_PORT",
    # MPI
    "OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX", "OMPI_MCA_orte_default_hostfile", "MPI4PY_LIBMPI",
    "MPI4PY_MPIABI", "I_MPI_ROOT",
    # the loader and temporary files
    "LD_PRELOAD", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONPATH", "LANG", "LC_ALL",
)  # fmt: skip


def collect(usage: Usage) -> dict[str, Any]:
    """Variables of the list that are set, warnings and errors of settings."""
    notes, error = _settings()
    return {
        "variables": {name: os.environ[name] for name in NAMES if os.environ.get(name)},
        "notes": notes,
        "setting_error": error,
    }


def _settings() -> tuple[list[str], str]:
    """Return the warnings about unknown settings, and the error that ``init()`` would raise."""
    # As rank 0: only that one warns.
    environ = {name: text for name, text in os.environ.items() if not name.endswith(("_RANK", "_PROCID"))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingWarning)
        try:
            load(environ)
        except SettingError as error:
            return [], str(error)
    return [str(warning.message) for warning in caught], ""
