"""Environment variables that are recognized but are not settings."""

from __future__ import annotations

RANK_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""Variables that give a process its ranks and sizes, without the prefix. Set by launchers or ``init()``."""

_TUNER = "the tuner compares neighboring values and does not fit a model"
_NCCL = "PyTorch sets up NCCL"
_GLOO = "Gloo is not used; MPI connects the ranks"
_ONE_SCHEME = "ranks on a host first reduce in shared memory; --autotune detects whether that is slower"
NO_EFFECT: dict[str, tuple[str, str]] = {
    "ELASTIC": ("0", "jobs keep the ranks that they start with"),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("20", _TUNER),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ("0.8", _TUNER),
    "DISABLE_GROUP_FUSION": ("0", "groups may share a batch, which does not affect their results"),
    "DYNAMIC_PROCESS_SETS": ("1", "process sets can always be added and removed"),
    "HIERARCHICAL_ALLREDUCE": ("0", _ONE_SCHEME),
    "HIERARCHICAL_ALLGATHER": ("0", _ONE_SCHEME),
    "TORUS_ALLREDUCE": ("0", _NCCL),
    "NUM_NCCL_STREAMS": ("1", _NCCL),
    "BATCH_D2D_MEMCOPIES": ("1", _NCCL),
    "THREAD_AFFINITY": ("", "the engine's thread sleeps while there is nothing to exchange"),
    "ENABLE_ASYNC_COMPLETION": ("0", _NCCL),
    "DISABLE_NVTX_RANGES": ("0", "NVTX annotations are not available"),
    "ENABLE_XLA_OPS": ("0", "Ringdance has no native code that XLA could call"),
    "ADASUM_MPI_CHUNK_SIZE": ("1073741824", "Adasum uses the same chunks as other operations"),
    "CCL_CACHE": ("0", "oneCCL is not used"),
    "GLOO_TIMEOUT_SECONDS": ("30", _GLOO),
    "GLOO_IFACE": ("", _GLOO),
    "CONTROLLER": ("MPI", _GLOO),
}
"""Default value and reason for each Horovod setting without an effect here. Names omit the prefix."""

# Used only by Horovod's launchers. Ringdance gets this information from MPI.
_LAUNCHER = """
HOSTNAME GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT START_TIMEOUT SPARK_START_TIMEOUT
SPARK_USE_LOCAL_RANK_GPU_INDEX SPARK_PYTHONPATH SPARK_WORK_DIR
"""

# Used when building Horovod. Ringdance does not compile anything.
_BUILD = """
WITH_TENSORFLOW WITH_PYTORCH WITH_MXNET WITH_MPI WITH_GLOO WITH_NVTX WITHOUT_TENSORFLOW WITHOUT_PYTORCH
WITHOUT_MXNET WITHOUT_MPI WITHOUT_GLOO WITHOUT_NVTX GPU GPU_ALLREDUCE GPU_ALLGATHER
GPU_BROADCAST GPU_ALLTOALL GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL CUDA_HOME ROCM_HOME NCCL_HOME
NCCL_INCLUDE NCCL_LIB NCCL_LINK NVTX_INCLUDE BUILD_ARCH_FLAGS BUILD_CUDA_CC_LIST CMAKE DEBUG SKIP_COMPILE
LOCAL_VERSION MIXED_INSTALL TEST_GPU
"""

LAUNCHER_NAMES: frozenset[str] = frozenset(
    [f"HOROVOD_{name}" for name in (*RANK_VARIABLES, *_LAUNCHER.split())]
    + [f"RINGDANCE_{name}" for name in RANK_VARIABLES]
)
BUILD_NAMES: frozenset[str] = frozenset("HOROVOD_" + name for name in _BUILD.split())

# `ringdance run` passes information to its ranks in variables with this prefix. Users do not set them.
LAUNCH_PREFIX = "RINGDANCE_JOB"
# init() sets this variable to a JSON description of the rank, for processes that the rank starts.
STARTED_BY = "RINGDANCE_JOB_RANK"
# `ringdance search` passes information to its trials in variables with this prefix.
SEARCH_PREFIX = "RINGDANCE_SEARCH_"

# Environment variables in which common launchers pass each process its rank and the number of processes.
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "MPI_LOCALRANKID")
SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
