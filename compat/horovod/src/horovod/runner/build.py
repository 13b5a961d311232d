"""``horovodrun --check-build``: print what can be used here."""

from __future__ import annotations

import horovod
from horovod.common import util
from ringdance.errors import LaunchError
from ringdance.launch.mpi import Mpi, find_mpi

__all__ = ["check_build"]


def check_build(verbose: bool = False) -> str:
    """Return the report: a title, then a line ``[X]`` or ``[ ]`` per framework, controller and operation.

    Args:
        verbose: Add the MPI library, or the reason why it was not found.
    """
    found, about = _mpi()
    blocks: dict[str, dict[str, bool]] = {
        "Available Frameworks": {
            "TensorFlow": util.extension_available("tensorflow"),
            "PyTorch": util.extension_available("torch"),
            "MXNet": util.extension_available("mxnet"),
        },
        "Available Controllers": {"MPI": found, "Gloo": util.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": util.nccl_built(),
            "DDL": util.ddl_built(),
            "CCL": util.ccl_built(),
            "MPI": found,
            "Gloo": util.gloo_built(),
        },
    }
    lines = [f"Horovod v{horovod.__version__}:"]
    for title, items in blocks.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in items.items()]
    if verbose:
        lines += ["", f"MPI: {about}"]
    return "\n".join(lines)


def _mpi() -> tuple[bool, str]:
    try:
        mpi: Mpi = find_mpi()
    except LaunchError as error:
        return False, str(error)
    return util.mpi_built(), f"{mpi.family} ({mpi.source}), {mpi.mpiexec}"
