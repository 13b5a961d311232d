"""Declarations of all settings. Each is a field of ``Settings`` with its default, unit and description.

``RINGDANCE_CHUNK_BYTES`` sets the field ``chunk_bytes``. If Horovod has an equivalent setting, its name
(``legacy``) also sets the field. Horovod names that have no effect here are listed in ``names.NO_EFFECT``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringdance.settings.parse import (
    ADDRESS,
    AT_LEAST_ONE,
    BYTES,
    COUNT,
    NUMBER,
    POSITIVE,
    STEPS,
    SWITCH,
    TEXT,
    Parser,
    choice,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        name: Attribute of ``Settings``.
        default: Value if no variable sets it.
        parser: Converts text to a value.
        doc: Short description.
        unit: Unit of the value, or "" if it has none.
        own: The ``RINGDANCE_*`` name.
        legacy: The ``HOROVOD_*`` name, or "" if there is none.
        common: True if the value must be equal on all ranks, because it determines the layout of shared
            memory, how batches are divided, or what is exchanged. ``init()`` compares these values.
    """

    name: str
    default: Any
    parser: Parser[Any]
    doc: str
    unit: str = ""
    own: str = ""
    legacy: str = ""
    common: bool = False


def _setting(default: T, parser: Parser[T], doc: str, **more: Any) -> T:
    """Declare a field of ``Settings``. ``more`` sets further attributes of its ``Setting``."""
    return field(default=default, metadata={"parser": parser, "doc": doc, **more})


def _switch(default: bool, doc: str, **more: Any) -> bool:
    return _setting(default, SWITCH, doc, **more)


@dataclass(frozen=True)
class Settings:
    """The values and origins of all settings. Created by ``load()``, or directly in tests."""

    # Batches
    fusion_threshold: int = _setting(
        128 << 20, BYTES, "Maximum size of a batch of tensors that is exchanged as one. 0: no batching.",
        unit="bytes", legacy="HOROVOD_FUSION_THRESHOLD", common=True,
    )
    cycle_time: float = _setting(
        1.0, NUMBER, "How long a submitted tensor may wait for others before a negotiation round starts.",
        unit="ms", legacy="HOROVOD_CYCLE_TIME",
    )
    cache_capacity: int = _setting(
        1024, COUNT, "Size of each process set's response cache. A cached tensor is negotiated with one bit.",
        unit="tensors", legacy="HOROVOD_CACHE_CAPACITY", common=True,
    )
    deterministic: bool = _switch(
        False, "Sum each element in a fixed order, so that results are bitwise reproducible.", common=True
    )
    overlap: str = _setting(
        "auto", choice("auto", "on", "off"),
        "Exchange gradients on the engine's thread during the backward pass. auto: only if cores are idle.",
    )
    sparse: str = _setting(
        "auto", choice("auto", "rows", "dense"),
        "How to exchange sparse gradients: as rows or as dense tensors. auto: by the number of rows.",
        common=True,
    )
    check_weights: str = _setting(
        "warn", choice("warn", "error", "off"),
        "What to do if parameters differ between ranks. Checked in steps 2 (PyTorch only), 10, 100, ...",
        common=True,
    )
    jax_ffi: str = _setting(
        "auto", choice("auto", "off"),
        "Exchange the buffers of compiled JAX programs without copies. auto: if possible. off: never.",
        common=True,
    )

    # Memory and exchange
    chunk_bytes: int = _setting(
        768 << 10, BYTES, "Size of the chunks in which a batch is exchanged. Should fit in a core's cache.",
        unit="bytes", common=True,
    )
    small_bytes: int = _setting(
        16 << 10, BYTES, "Batches up to this size are exchanged with the lowest latency.",
        unit="bytes", common=True,
    )
    gpu_operations: str = _setting(
        "nccl", choice("nccl", "mpi"),
        "How to exchange PyTorch and JAX arrays on GPUs: with NCCL, or with MPI from host memory.",
        legacy="HOROVOD_GPU_OPERATIONS", common=True,
    )
    cpu_operations: str = _setting(
        "mpi", choice("mpi", "gloo"),
        "How to exchange PyTorch tensors on the CPU: through shared memory and MPI, or Gloo.",
        legacy="HOROVOD_CPU_OPERATIONS", common=True,
    )
    window: bool = _switch(True, "Use shared memory between ranks on the same host.", common=True)
    spin_microseconds: int = _setting(
        300, COUNT, "How long a waiting rank polls (yielding its core) before it sleeps.", unit="µs"
    )
    mpi_threads_disable: bool = _switch(
        False, "Request MPI_THREAD_SINGLE. Collectives then run only while the main thread waits.",
        legacy="HOROVOD_MPI_THREADS_DISABLE",
    )
    init_timeout: float = _setting(
        120.0, POSITIVE, "How long init() waits for all ranks before a warning lists the missing ones.",
        unit="s",
    )
    elastic_timeout: float = _setting(
        600.0, POSITIVE, "How long ranks that restart after an error wait for each other.",
        unit="s", legacy="HOROVOD_ELASTIC_TIMEOUT",
    )

    # Tuning
    autotune: bool = _switch(
        False, "Try different batch and chunk sizes in up to 280 steps, then use the best.",
        legacy="HOROVOD_AUTOTUNE", common=True,
    )
    autotune_log: str = _setting(
        "", TEXT, "CSV file on rank 0's host, in which autotune logs the values that it tries. The result is "
        "written to a .json file next to it.", legacy="HOROVOD_AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = _setting(
        3, COUNT, "Number of samples that autotune takes before it changes any value.",
        unit="samples", legacy="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = _setting(
        4, AT_LEAST_ONE, "Steps per autotune sample. The first sample of each value takes two steps.",
        unit="steps", legacy="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    tuned: str = _setting(
        "", TEXT, "JSON file on rank 0's host with the autotune result to use. Ignored if it belongs to a "
        "different model or different hardware.", common=True,
    )

    # Stalls and logs
    stall_check_disable: bool = _switch(
        False, "Do not check for tensors that some ranks submit and others do not.",
        legacy="HOROVOD_STALL_CHECK_DISABLE",
    )
    stall_check_time: float = _setting(
        4.0, POSITIVE, "Time after which a tensor that some ranks have not submitted is reported. The "
        "default grows with the duration of a step.",
        unit="s", legacy="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_time: float = _setting(
        0.0, NUMBER, "Time after which a tensor that some ranks have not submitted stops the job. 0: never.",
        unit="s", legacy="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    deadlock_time: float = _setting(
        30.0, NUMBER, "Time without new calls after which ranks that all wait for each other raise "
        "DeadlockError. 0: never (the default in scripts that import horovod).", unit="s",
    )
    log_level: str = _setting(
        "warning", choice("trace", "debug", "info", "warning", "error", "fatal"),
        "Minimum severity of the messages to print.", legacy="HOROVOD_LOG_LEVEL",
    )
    log_hide_time: bool = _switch(False, "Omit the timestamp from log lines.", legacy="HOROVOD_LOG_HIDE_TIME")
    flight_recorder_dir: str = _setting(
        "", TEXT, "Directory for the record of the last batches, which is written if the job fails. Empty: "
        "the system's temporary directory.",
    )
    timeline: str = _setting(
        "", TEXT, "File for a Chrome trace of all tensors, or DYNAMIC to wait for start_timeline().",
        legacy="HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = _switch(
        False, "Mark each negotiation round in the timeline.", legacy="HOROVOD_TIMELINE_MARK_CYCLES"
    )
    timeline_steps: tuple[int, ...] = _setting(
        (), STEPS, "Steps to record in the timeline, such as 100:110. Empty: all, up to the maximum size.",
        unit="steps",
    )
    summary_time: float = _setting(
        60.0, NUMBER, "Print a speed summary at the end of runs that last at least this long. 0: never.",
        unit="s",
    )
    metrics_port: str = _setting(
        "", ADDRESS, "Where each host serves its ranks' metrics to Prometheus: a port, or ADDRESS:PORT for "
        "access from other hosts. 0: any free port, which is printed. Empty: nowhere.",
    )
    metrics_dir: str = _setting(
        "", TEXT, "Directory for the metrics of each host's ranks over time (metrics-<lowest rank>.jsonl).",
    )
    metrics_interval: float = _setting(
        5.0, POSITIVE, "Time between samples in the files in metrics_dir. Increases in long runs.", unit="s"
    )
    input_check: str = _setting(
        "off", choice("off", "loader", "step", "both"),
        "What `ringdance bench input` measures in this run. The run stops afterwards.",
    )
    input_check_time: float = _setting(
        8.0, POSITIVE, "Length of a `ringdance bench input` run, after a warm-up of at least a third of it.",
        unit="s",
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Return the origin of a setting's value: "default" or "environment variable NAME".

        Raises:
            KeyError: The setting does not exist.
        """
        if all(setting.name != name for setting in SETTINGS):
            raise KeyError(name)
        return self.origins.get(name, "default")


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(item.name, item.default, own=f"RINGDANCE_{item.name.upper()}", **item.metadata)
    for item in dataclasses.fields(Settings)
    if item.metadata
)
"""All settings, in the order in which ``ringdance settings`` shows them."""
