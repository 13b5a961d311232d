"""Names in the environment that are not knobs, and are no mistakes either."""

from __future__ import annotations

PLACE_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""Which rank a process is, where: with either prefix. Set by launchers, and by init() where none has."""

# Horovod's launchers only; Ringdance asks MPI instead.
_LAUNCHER = """
HOSTNAME GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT START_TIMEOUT SPARK_START_TIMEOUT
SPARK_USE_LOCAL_RANK_GPU_INDEX SPARK_PYTHONPATH SPARK_WORK_DIR
"""

# Horovod's build read these; nothing is compiled here.
_BUILD = """
WITH_TENSORFLOW WITH_PYTORCH WITH_MXNET WITH_MPI WITH_GLOO WITH_NVTX WITHOUT_TENSORFLOW WITHOUT_PYTORCH
WITHOUT_MXNET WITHOUT_MPI WITHOUT_GLOO WITHOUT_NVTX GPU GPU_OPERATIONS GPU_ALLREDUCE GPU_ALLGATHER
GPU_BROADCAST GPU_ALLTOALL GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL CUDA_HOME ROCM_HOME NCCL_HOME
NCCL_INCLUDE NCCL_LIB NCCL_LINK NVTX_INCLUDE BUILD_ARCH_FLAGS BUILD_CUDA_CC_LIST CMAKE DEBUG SKIP_COMPILE
LOCAL_VERSION MIXED_INSTALL TEST_GPU
"""

LAUNCHER_NAMES: frozenset[str] = frozenset(
    [f"HOROVOD_{name}" for name in (*PLACE_NAMES, *_LAUNCHER.split())]
    + [f"RINGDANCE_{name}" for name in PLACE_NAMES]
)
BUILD_NAMES: frozenset[str] = frozenset("HOROVOD_" + name for name in _BUILD.split())

# `ringdance run` tells its ranks about itself under this prefix; people do not set these.
LAUNCH_PREFIX = "RINGDANCE_JOB"

# Environment variables in which the usual launchers say which rank a process is.
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
