"""Every knob, declared once: a field of :class:`Settings` with its default, unit and doc line.

A field ``piece_bytes`` is set by ``RINGDANCE_PIECE_BYTES``; where Horovod knew it, ``legacy`` is
what follows ``HOROVOD_`` there. A knob that is accepted but changes nothing says why in
``no_effect``: who sets it is told, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ringdance.settings.parse import BYTES, CORES, SWITCH, TEXT, Parser, choice, integer, number

T = TypeVar("T")

OWN_PREFIX = "RINGDANCE_"
LEGACY_PREFIX = "HOROVOD_"


@dataclass(frozen=True)
class Knob:
    """What is known about one setting.

    Attributes:
        name: attribute of :class:`Settings`.
        default: its value when nothing sets it.
        parser: how text becomes a value.
        doc: one line for people.
        unit: of the value; empty for words and switches.
        own: the ``RINGDANCE_*`` name; empty for a knob that only Horovod has.
        legacy: the ``HOROVOD_*`` name, or empty.
        unusable: the value that a legacy name has when its text cannot be used; None: the default.
        strict: unusable text in the legacy name is an error, as it was in the original.
        no_effect: empty when the knob works, else why it changes nothing.
    """

    name: str
    default: Any
    parser: Parser[Any]
    doc: str
    unit: str = ""
    own: str = ""
    legacy: str = ""
    unusable: Any = None
    strict: bool = False
    no_effect: str = ""


def _knob(
    default: T,
    parser: Parser[T],
    doc: str,
    *,
    unit: str = "",
    legacy: str = "",
    own: bool = True,
    unusable: T | None = None,
    strict: bool = False,
    no_effect: str = "",
) -> T:
    """Declare a field of Settings; the type that checkers see is the type of its default."""
    draft = {"parser": parser, "doc": doc, "unit": unit, "legacy": legacy, "own": own}
    draft |= {"unusable": unusable, "strict": strict, "no_effect": no_effect}
    return field(default=default, metadata=draft)


def _switch(default: bool, doc: str, *, legacy: str = "", own: bool = True, no_effect: str = "") -> bool:
    return _knob(default, SWITCH, doc, legacy=legacy, own=own, unusable=False, no_effect=no_effect)


_NO_TUNER = "there is no automatic tuner yet"
_NO_TIMELINE = "the timeline is not written yet"
_NO_NCCL = "tensors on a GPU do not go through NCCL yet"
_ONE_SCHEME = "the ranks of a host always meet in shared memory first, so there is no flat scheme to leave"
_NO_GLOO = "Gloo is not used; MPI connects the ranks"


@dataclass(frozen=True)
class Settings:
    """The values of all knobs, and where each came from. Make it with ``load()``, or directly in tests."""

    # Batches
    fusion_threshold: int = _knob(
        128 << 20, BYTES, "Most bytes of tensors exchanged as one batch; 0: one tensor at a time.",
        unit="bytes", legacy="FUSION_THRESHOLD",
    )
    cycle_time: float = _knob(
        1.0, number(), "How long the oldest waiting tensor may wait for company before a round starts.",
        unit="ms", legacy="CYCLE_TIME", unusable=0.0,
    )
    cache_capacity: int = _knob(
        1024, integer(), "Tensors that a process set remembers, so that it agrees on them by one bit each.",
        unit="tensors", legacy="CACHE_CAPACITY", unusable=0,
    )
    disable_group_fusion: bool = _switch(
        False, "Do not exchange an explicit group together with other tensors.",
        legacy="DISABLE_GROUP_FUSION",
        no_effect="a group and its neighbours may share a batch; their results do not depend on it",
    )
    deterministic: bool = _switch(
        False, "Sum each element in one order, whatever is exchanged with it: two runs are bit-equal."
    )
    overlap: str = _knob(
        "auto", choice("auto", "on", "off"),
        "Exchange gradients on the engine's thread during backward; auto: where cores are free for it.",
    )
    sparse: str = _knob(
        "auto", choice("auto", "rows", "dense"),
        "How sparse gradients go: as rows, as a dense table; auto: by how many rows all ranks have.",
    )
    jax_ffi: str = _knob(
        "auto", choice("auto", "off"),
        "Give compiled JAX programs' own memory to the exchange; off, or where it is unknown: copies.",
    )
    dynamic_process_sets: bool = _switch(
        False, "Accepted, since scripts set it: process sets can always be added and removed.",
        legacy="DYNAMIC_PROCESS_SETS", own=False,
    )

    # Memory and exchange
    piece_bytes: int = _knob(
        768 << 10, BYTES, "Size of the pieces in which a batch is streamed; should fit the cores' caches.",
        unit="bytes",
    )
    small_bytes: int = _knob(
        16 << 10, BYTES, "Up to this size a batch goes the way with the lowest latency.", unit="bytes"
    )
    window: bool = _switch(True, "Use shared memory between the ranks of a host.")
    window_bytes: int = _knob(
        0, BYTES, "Shared memory of each rank for exchange within its host; 0: chosen from piece_bytes.",
        unit="bytes",
    )
    spin_microseconds: int = _knob(
        300, integer(), "How long a waiting rank polls (yielding its core) before it sleeps.", unit="µs"
    )
    thread_affinity: tuple[int, ...] = _knob(
        (), CORES, "Core for the engine's thread of each local rank (Linux); empty: not pinned.",
        legacy="THREAD_AFFINITY",
    )
    mpi_threads_disable: bool = _switch(
        False, "Ask MPI for its single-thread level; collectives then run only while the main thread waits.",
        legacy="MPI_THREADS_DISABLE",
    )
    init_timeout: float = _knob(
        120.0, number(above=True), "How long init() waits for all ranks before it names the missing ones.",
        unit="s",
    )
    elastic_timeout: float = _knob(
        600.0, number(above=True), "How long ranks that start again after an error wait for one another.",
        unit="s", legacy="ELASTIC_TIMEOUT",
    )

    # Watching
    stall_check_disable: bool = _switch(
        False, "Do not look for tensors that some ranks submit and others do not.",
        legacy="STALL_CHECK_DISABLE",
    )
    stall_check_time: float = _knob(
        4.0, number(above=True), "After this time a tensor that some ranks have not submitted is reported.",
        unit="s", legacy="STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_time: float = _knob(
        0.0, number(), "After this time such a tensor ends the job; 0: never.",
        unit="s", legacy="STALL_SHUTDOWN_TIME_SECONDS",
    )
    deadlock_time: float = _knob(
        30.0, number(), "After this time without a new call ranks that all wait for each other raise "
        "DeadlockError; 0: never (as with Horovod's names).", unit="s",
    )
    log_level: str = _knob(
        "warning", choice("trace", "debug", "info", "warning", "error", "fatal"),
        "Least severity of the messages that are printed.", legacy="LOG_LEVEL",
    )
    log_hide_time: bool = _switch(False, "Leave the time out of log lines.", legacy="LOG_HIDE_TIME")
    flight_recorder_dir: str = _knob(
        "", TEXT, "Folder for the record of the last batches, written on a failure; empty: the system's "
        "temporary folder.",
    )
    recorder_batches: int = _knob(
        256, integer(), "Batches that the flight recorder keeps; 0: none.", unit="batches"
    )
    timeline: str = _knob(
        "", TEXT, "File for a Chrome trace of all tensors, or DYNAMIC to wait for start_timeline().",
        legacy="TIMELINE", no_effect=_NO_TIMELINE,
    )
    timeline_mark_cycles: bool = _switch(
        False, "Mark the start of each round in the timeline.", legacy="TIMELINE_MARK_CYCLES",
        no_effect=_NO_TIMELINE,
    )
    elastic: bool = _switch(
        False, "The job may lose and gain ranks.", legacy="ELASTIC",
        no_effect="jobs keep the ranks that they start with",
    )

    # Tuner
    autotune: bool = _switch(
        False, "Search the best fusion_threshold and cycle_time while training.", legacy="AUTOTUNE",
        no_effect=_NO_TUNER,
    )
    autotune_log: str = _knob("", TEXT, "CSV file of what the tuner tried.", legacy="AUTOTUNE_LOG",
                              no_effect=_NO_TUNER)
    autotune_warmup_samples: int = _knob(
        3, integer(), "Samples that the tuner drops first.", unit="samples",
        legacy="AUTOTUNE_WARMUP_SAMPLES", no_effect=_NO_TUNER,
    )
    autotune_steps_per_sample: int = _knob(
        10, integer(1), "Training steps in one sample of the tuner.", unit="steps",
        legacy="AUTOTUNE_STEPS_PER_SAMPLE", no_effect=_NO_TUNER,
    )
    autotune_bayes_opt_max_samples: int = _knob(
        20, integer(1), "Samples after which the tuner decides.", unit="samples",
        legacy="AUTOTUNE_BAYES_OPT_MAX_SAMPLES", no_effect=_NO_TUNER,
    )
    autotune_gaussian_process_noise: float = _knob(
        0.8, number(), "Noise assumed in the tuner's measurements.",
        legacy="AUTOTUNE_GAUSSIAN_PROCESS_NOISE", no_effect=_NO_TUNER,
    )

    # Of the original only: accepted, so that its job scripts run unchanged
    hierarchical_allreduce: bool = _switch(
        False, "All-reduce within each host first.", legacy="HIERARCHICAL_ALLREDUCE", own=False,
        no_effect=_ONE_SCHEME,
    )
    hierarchical_allgather: bool = _switch(
        False, "All-gather within each host first.", legacy="HIERARCHICAL_ALLGATHER", own=False,
        no_effect=_ONE_SCHEME,
    )
    torus_allreduce: bool = _switch(
        False, "All-reduce on a two-dimensional grid of GPUs.", legacy="TORUS_ALLREDUCE", own=False,
        no_effect=_NO_NCCL,
    )
    num_nccl_streams: int = _knob(
        1, integer(1), "Parallel NCCL streams.", unit="streams", legacy="NUM_NCCL_STREAMS", own=False,
        no_effect=_NO_NCCL,
    )
    batch_d2d_memcopies: bool = _switch(
        True, "Copy many GPU tensors by one kernel.", legacy="BATCH_D2D_MEMCOPIES", own=False,
        no_effect=_NO_NCCL,
    )
    enable_async_completion: bool = _switch(
        False, "Report the end of GPU work by event.", legacy="ENABLE_ASYNC_COMPLETION", own=False,
        no_effect=_NO_NCCL,
    )
    disable_nvtx_ranges: bool = _switch(
        False, "No NVTX annotation.", legacy="DISABLE_NVTX_RANGES", own=False,
        no_effect="no NVTX annotation is made",
    )
    enable_xla_ops: bool = _switch(
        False, "All-reduce as a custom call of TensorFlow's XLA.", legacy="ENABLE_XLA_OPS", own=False,
        no_effect="there is no native code that XLA could call",
    )
    adasum_mpi_chunk_size: int = _knob(
        1 << 30, BYTES, "Bytes of one message of Adasum.", unit="bytes", legacy="ADASUM_MPI_CHUNK_SIZE",
        own=False, no_effect="Adasum is exchanged in pieces like everything else",
    )
    ccl_cache: bool = _switch(
        False, "Caching in oneCCL.", legacy="CCL_CACHE", own=False, no_effect="oneCCL is not used"
    )
    gloo_timeout_seconds: float = _knob(
        30.0, number(), "Time limit of Gloo's connections and collectives.", unit="s",
        legacy="GLOO_TIMEOUT_SECONDS", own=False, no_effect=_NO_GLOO,
    )
    gloo_iface: str = _knob("", TEXT, "Network interface for Gloo.", legacy="GLOO_IFACE", own=False,
                            no_effect=_NO_GLOO)
    cpu_operations: str = _knob(
        "MPI", choice("MPI", "GLOO", "CCL"), "What moves tensors in host memory.", legacy="CPU_OPERATIONS",
        own=False, strict=True, no_effect="shared memory and MPI move them",
    )
    controller: str = _knob(
        "MPI", choice("MPI", "GLOO"), "What the ranks use to agree.", legacy="CONTROLLER", own=False,
        strict=True, no_effect=_NO_GLOO,
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def origin(self, name: str) -> str:
        """Where the value of knob `name` came from: "default" or "environment variable NAME".

        Raises:
            KeyError: there is no knob of that name.
        """
        if name not in _BY_NAME:
            raise KeyError(name)
        return self.origins.get(name, "default")


def _finish(item: dataclasses.Field[Any]) -> Knob:
    draft = dict(item.metadata)
    draft["own"] = OWN_PREFIX + item.name.upper() if draft["own"] else ""
    draft["legacy"] = LEGACY_PREFIX + draft["legacy"] if draft["legacy"] else ""
    return Knob(item.name, item.default, **draft)


KNOBS: tuple[Knob, ...] = tuple(_finish(item) for item in dataclasses.fields(Settings) if item.metadata)
"""All knobs, in the order in which people should meet them."""

_BY_NAME = {knob.name: knob for knob in KNOBS}
