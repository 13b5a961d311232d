"""Determine what limits a run: input, computation, communication or skew."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from ringdance.core.reports import judging
from ringdance.tools.report.metrics import Rank, RunMetrics

_FEW = 10  # number of steps below which a longer run is recommended


@dataclass(frozen=True)
class Limit:
    """What limits a training run.

    Attributes:
        bound: Short name of the limit.
        sentence: Sentence that describes the limit.
        next_step: Sentence that says what to try next.
        evidence: Further measurements that support the sentence.
    """

    bound: str
    sentence: str
    next_step: str
    evidence: list[str] = field(default_factory=list)


def judge(run: RunMetrics, uneven: float = 0.0) -> Limit:
    """Determine what limits a run.

    The time for which the slowest rank waits counts as communication. Any additional waiting time of the
    other ranks counts as skew. The remaining time is computation or waiting for input.

    Args:
        run: Metrics of the run.
        uneven: Share of the time that every rank spends waiting for others to submit requests, according to
            the timeline. Because a different rank is late each time, metrics alone would count this time
            as communication.
    """
    communication, skew = max(0.0, run.waiting.communication - uneven), run.waiting.skew
    own = 1 - fmean([rank.exposed for rank in run.ranks])
    cores = fmean([rank.cores for rank in run.ranks])
    evidence = _evidence(run, communication, uneven, own)
    taken, host = max(((run.taken(h), h) for h in run.hosts if run.in_use(h) > judging.BUSY), default=(0, ""))
    skewed = run.size > 1 and skew >= max(judging.WORTH, communication)
    # True if the ranks wait for something other than a core, such as their input.
    waits = all(_used(rank) < judging.NO_CORES for rank in ([run.slowest] if skewed else run.ranks))
    if taken >= judging.TAKEN and not (waits and (skewed or max(communication, uneven) < judging.WORTH)):
        return Limit(
            "other programs",
            f"Other programs use {taken:.0%} of the cores of {host}, so it is not known what limits the run "
            "itself.", "Run the job again without these programs, or give it its own cores.", evidence,
        )  # fmt: skip
    if run.size > 1 and uneven >= max(judging.WORTH, communication, skew) and run.in_use() < judging.BUSY:
        return Limit(
            "skew", "Ranks wait for each other, but for a different rank each time.",
            "Give all ranks the same amount of work in each step, for example samples of similar length, and "
            "give each rank its own cores.", evidence,
        )  # fmt: skip
    if skewed:
        return _skew(run, evidence)
    if run.size > 1 and communication >= judging.WORTH:
        return _communication(run, communication, evidence)
    # Ranks that use fewer cores than this must be waiting for something. On a busy host, where this may be a
    # core, the threshold is lower.
    enough = judging.NO_CORES if run.in_use() > judging.BUSY else judging.IDLE_CORES
    idle = cores / max(own, judging.LEAST) < enough
    if run.gpu < judging.IDLE_GPU * own if run.gpu is not None else idle:
        also = again = ""
        if taken >= judging.TAKEN:  # ranks that wait for a core also seem idle
            also = f" They may be waiting for cores: other programs use {taken:.0%} of the cores of {host}."
            again = "Run the job again without these programs. If the ranks still barely compute: "
        return Limit(
            "input", f"Ranks barely wait for exchanges or for each other, yet they barely compute.{also}",
            f"{again}Load data in parallel with training: use more data loader workers, prefetching, or a "
            "local disk. Measure the loader alone. It must deliver more than "
            f"{run.steps_per_second:.3g} batches per second. Until then, more ranks do not help.", evidence,
        )  # fmt: skip
    return Limit("computation", "Ranks compute most of the time.", _scale(run, evidence), evidence)


def _evidence(run: RunMetrics, communication: float, uneven: float, own: float) -> list[str]:
    """Return sentences that break down how the time in a step is spent."""
    step = 1e3 / run.steps_per_second
    cores = fmean([rank.cores for rank in run.ranks])
    of_gpu = f", and its GPU is in use {run.gpu:.0%} of the time." if run.gpu is not None else "."
    evidence = [
        f"Communication: even the rank that waits least waits {communication:.0%} of a step of {step:.3g} ms "
        "for exchanges.",
        f"Skew: on top of that, the other ranks wait {run.waiting.skew:.0%} of the time for the slowest.",
        f"Own work: {own:.0%} of the time, on average. A rank uses {cores:.2f} cores{of_gpu}",
    ]
    if (steps := min(rank.steps for rank in run.ranks)) < _FEW:
        evidence.append(f"Based on only {steps} step{'s' * (steps > 1)} per rank. A longer run says more.")
    if uneven >= 0.01:
        text = f"Uneven steps: all ranks wait {uneven:.0%} of the time, for a different rank each time."
        evidence.insert(1, text)
    return evidence


def _communication(run: RunMetrics, communication: float, evidence: list[str]) -> Limit:
    last = run.slowest.rows[-1]
    evidence.append(
        f"{last['bytes'] / last['steps'] / 1e6:,.1f} MB are reduced per step. Without this wait, "
        f"{run.size} ranks would be as fast as {run.size / max(judging.LEAST, 1 - communication):.3g} are."
    )
    return Limit(
        "communication", "All ranks wait equally for exchanges.",
        "First exchange less often: use a larger batch on each rank, or pass backward_passes_per_step=2 to "
        "DistributedOptimizer. Then send fewer bytes: pass compression=hvd.Compression.fp16. If there are "
        "several hosts, measure the network between them with `iperf3`.", evidence,
    )  # fmt: skip


def _used(one: Rank) -> float:
    """Return the number of cores that a rank uses while it is not waiting for other ranks."""
    return one.cores / max(1 - one.exposed, judging.LEAST)


def _skew(run: RunMetrics, evidence: list[str]) -> Limit:
    slow = run.slowest
    cores = fmean([rank.cores for rank in run.ranks if rank is not slow])
    step = 1e3 / run.steps_per_second
    evidence.append(
        f"Rank {slow.rank} on host {slow.host} waits {slow.exposed:.0%} of the time. Its own work takes "
        f"{run.waiting.longer:.1f} times as long as on the others. If it were as fast, a step would take "
        f"{step * (1 - run.waiting.skew):.3g} ms instead of {step:.3g}. It uses {slow.cores:.2f} cores on "
        f"average; the others use {cores:.2f}. {run.in_use(slow.host):.0%} of its host's cores are in use."
    )
    doing = (
        f"It barely uses its cores. Find out what rank {slow.rank} waits for: its data, a disk or a lock"
        if _used(slow) < judging.IDLE_CORES
        else f"Find out why rank {slow.rank} has more work or is slower: larger samples, other programs on "
        f"{slow.host}, fewer cores, a hot processor or GPU"
    )
    return Limit(
        "skew", f"The others wait for rank {slow.rank} on host {slow.host}.",
        f"{doing}. `ringdance explain` shows what the rank is doing. `ringdance doctor` compares the hosts.",
        evidence,
    )  # fmt: skip


def _scale(run: RunMetrics, evidence: list[str]) -> str:
    """Return what to try next for a compute-bound run: first scale up, then scale out."""
    what, used = ("cores", run.in_use()) if run.gpu is None else ("GPUs", run.gpu)
    evidence.append(f"{used:.0%} of the {what} are in use.")
    if used >= (judging.FULL_CORES if run.gpu is None else judging.FULL_GPU):
        return (
            f"The {what} are busy. First scale up: faster {what}, or mixed precision. Then scale out to more "
            "hosts (`ringdance run -H h1:N,h2:N`). `ringdance plan --from RUN_DIR` predicts the gain."
        )
    how = (
        "give each rank more threads (OMP_NUM_THREADS) or start more ranks on the same hosts. Then scale out "
        "to more hosts." if run.gpu is None
        else "use a larger batch, or more workers in the data loader. Then scale out to more ranks."
    )  # fmt: skip
    return (
        f"First scale up: the hardware can do up to {1 / max(used, 0.01):.1f} times as much. To use it, {how}"
    )
