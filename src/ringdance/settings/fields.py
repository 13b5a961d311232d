"""The settings, each declared once: a field of :class:`Settings` with its default, unit and description.

A field ``chunk_bytes`` is set by ``RINGDANCE_CHUNK_BYTES`` and, where Horovod has the setting, by its
``legacy`` name. Names that have no effect: ``names.NO_EFFECT``.
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
    """What is known about one setting.

    Attributes:
        name: attribute of :class:`Settings`.
        default: its value when nothing sets it.
        parser: how text becomes a value.
        doc: one sentence.
        unit: of the value; empty for words and switches.
        own: the ``RINGDANCE_*`` name.
        legacy: the ``HOROVOD_*`` name, or empty.
    """

    name: str
    default: Any
    parser: Parser[Any]
    doc: str
    unit: str = ""
    own: str = ""
    legacy: str = ""


def _setting(default: T, parser: Parser[T], doc: str, **more: Any) -> T:
    """Declare a field of Settings (``more``: see ``Setting``); its type is that of its default."""
    return field(default=default, metadata={"parser": parser, "doc": doc, **more})


def _switch(default: bool, doc: str, **more: Any) -> bool:
    return _setting(default, SWITCH, doc, **more)


@dataclass(frozen=True)
class Settings:
    """The values of all settings and their origins. Made by ``load()``, or directly in tests."""

    # Batches
    fusion_threshold: int = _setting(
        128 << 20, BYTES, "Most bytes of tensors exchanged as one batch; 0: one tensor at a time.",
        unit="bytes", legacy="HOROVOD_FUSION_THRESHOLD",
    )
    cycle_time: float = _setting(
        1.0, NUMBER, "How long a submitted tensor may wait for others before a round starts.",
        unit="ms", legacy="HOROVOD_CYCLE_TIME",
    )
    cache_capacity: int = _setting(
        1024, COUNT, "Tensors that a process set remembers, so that it agrees on them by one bit each.",
        unit="tensors", legacy="HOROVOD_CACHE_CAPACITY",
    )
    deterministic: bool = _switch(
        False, "Sum each element in one order, whatever is exchanged with it: two runs are bit-equal."
    )
    overlap: str = _setting(
        "auto", choice("auto", "on", "off"),
        "Exchange gradients on the engine's thread during backward; auto: if there are idle cores.",
    )
    sparse: str = _setting(
        "auto", choice("auto", "rows", "dense"),
        "How sparse gradients are exchanged: as rows or as dense tensors; auto: by the number of rows.",
    )
    check_weights: str = _setting(
        "warn", choice("warn", "error", "off"),
        "What happens if the ranks' parameters differ in step 2 (PyTorch only), 10, 100, 1000 and so on.",
    )
    jax_ffi: str = _setting(
        "auto", choice("auto", "off"),
        "Exchange compiled JAX programs' buffers without copies; off, or where that is not possible: copies.",
    )

    # Memory and exchange
    chunk_bytes: int = _setting(
        768 << 10, BYTES, "Size of the chunks in which a batch is exchanged; should fit the cores' caches.",
        unit="bytes",
    )
    small_bytes: int = _setting(
        16 << 10, BYTES, "Up to this size a batch is exchanged with the lowest latency.", unit="bytes"
    )
    gpu_operations: str = _setting(
        "nccl", choice("nccl", "mpi"),
        "How PyTorch's tensors on GPUs are exchanged: by NCCL, or by MPI from the host's memory.",
        legacy="HOROVOD_GPU_OPERATIONS",
    )
    cpu_operations: str = _setting(
        "mpi", choice("mpi", "gloo"),
        "How PyTorch's tensors on the CPU are exchanged: in shared memory and by MPI, or by torch's gloo.",
        legacy="HOROVOD_CPU_OPERATIONS",
    )
    window: bool = _switch(True, "Use shared memory between the ranks of a host.")
    spin_microseconds: int = _setting(
        300, COUNT, "How long a waiting rank polls (yielding its core) before it sleeps.", unit="µs"
    )
    mpi_threads_disable: bool = _switch(
        False, "Ask MPI for its single-thread level; collectives then run only while the main thread waits.",
        legacy="HOROVOD_MPI_THREADS_DISABLE",
    )
    init_timeout: float = _setting(
        120.0, POSITIVE, "How long init() waits for all ranks before it names the missing ones.",
        unit="s",
    )
    elastic_timeout: float = _setting(
        600.0, POSITIVE, "How long ranks that start again after an error wait for one another.",
        unit="s", legacy="HOROVOD_ELASTIC_TIMEOUT",
    )

    # Tuning
    autotune: bool = _switch(
        False, "Try other sizes of batches and chunks in up to 280 steps, and go on with the best.",
        legacy="HOROVOD_AUTOTUNE",
    )
    autotune_log: str = _setting(
        "", TEXT, "File for what autotune tries (CSV), on rank 0's host; the result is written beside it, as "
        ".json.", legacy="HOROVOD_AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = _setting(
        3, COUNT, "Samples that autotune takes before it changes anything.",
        unit="samples", legacy="HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps_per_sample: int = _setting(
        4, AT_LEAST_ONE, "Steps of a sample; the first look at a value takes two.",
        unit="steps", legacy="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    tuned: str = _setting(
        "", TEXT, "Result of autotune to run with (JSON), on rank 0's host; not used for another model or on "
        "other hardware.",
    )

    # Stalls and logs
    stall_check_disable: bool = _switch(
        False, "Do not look for tensors that some ranks submit and others do not.",
        legacy="HOROVOD_STALL_CHECK_DISABLE",
    )
    stall_check_time: float = _setting(
        4.0, POSITIVE, "After this time a tensor that some ranks have not submitted is reported. By default "
        "after a step's time, where that is longer.",
        unit="s", legacy="HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_time: float = _setting(
        0.0, NUMBER, "After this time such a tensor ends the job; 0: never.",
        unit="s", legacy="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    deadlock_time: float = _setting(
        30.0, NUMBER, "After this time without a new call ranks that all wait for each other raise "
        "DeadlockError; 0: never (as with Horovod's names).", unit="s",
    )
    log_level: str = _setting(
        "warning", choice("trace", "debug", "info", "warning", "error", "fatal"),
        "Least severity of the messages that are printed.", legacy="HOROVOD_LOG_LEVEL",
    )
    log_hide_time: bool = _switch(False, "Leave the time out of log lines.", legacy="HOROVOD_LOG_HIDE_TIME")
    flight_recorder_dir: str = _setting(
        "", TEXT, "Directory for the record of the last batches, written on a failure; empty: the system's "
        "temporary directory.",
    )
    timeline: str = _setting(
        "", TEXT, "File for a Chrome trace of all tensors, or DYNAMIC to wait for start_timeline().",
        legacy="HOROVOD_TIMELINE",
    )
    timeline_mark_cycles: bool = _switch(
        False, "Mark each round of agreement in the timeline.", legacy="HOROVOD_TIMELINE_MARK_CYCLES"
    )
    timeline_steps: tuple[int, ...] = _setting(
        (), STEPS, "Steps of which the timeline tells, such as 100:110; empty: all, up to its largest size.",
        unit="steps",
    )
    summary_time: float = _setting(
        60.0, NUMBER, "Runs that last at least so long end with a summary of their speed; 0: none.", unit="s"
    )
    metrics_port: str = _setting(
        "", ADDRESS, "Where each host serves its ranks' figures for Prometheus: port, or ADDRESS:PORT for "
        "more than this host's programs; 0: any free port, which is printed; empty: nowhere.",
    )
    metrics_dir: str = _setting(
        "", TEXT, "Directory for each host's metrics-<lowest rank>.jsonl: the ranks' figures over time.",
    )
    metrics_interval: float = _setting(
        5.0, POSITIVE, "Time between two samples in files of metrics_dir; grows in long runs.", unit="s"
    )
    input_check: str = _setting(
        "off", choice("off", "loader", "step", "both"),
        "What `ringdance bench input` measures in this run, which ends afterwards.",
    )
    input_check_time: float = _setting(
        8.0, POSITIVE, "How long it measures, after a warm-up of a third of it or longer.", unit="s"
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Where the value of setting `name` came from: "default" or "environment variable NAME".

        Raises:
            KeyError: there is no setting of that name.
        """
        if all(setting.name != name for setting in SETTINGS):
            raise KeyError(name)
        return self.origins.get(name, "default")


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(item.name, item.default, own=f"RINGDANCE_{item.name.upper()}", **item.metadata)
    for item in dataclasses.fields(Settings)
    if item.metadata
)
"""All settings, in the order in which they are shown."""
