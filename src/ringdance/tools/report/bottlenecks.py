"""What limits a run: input, computation, communication or skew."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from ringdance.core.reports.judging import (
    BUSY,
    FULL_CORES,
    FULL_GPU,
    IDLE_CORES,
    IDLE_GPU,
    LEAST,
    NO_CORES,
    TAKEN,
    WORTH,
)
from ringdance.tools.report.figures import Rank, Run

_FEW = 10  # steps


@dataclass(frozen=True)
class Limit:
    """What limits a training.

    Attributes:
        bound: in a word.
        sentence: the same in a sentence.
        next_step: the one thing to try.
        evidence: the numbers, unless the sentence has them.
    """

    bound: str
    sentence: str
    next_step: str
    evidence: list[str] = field(default_factory=list)


def judge(run: Run, uneven: float = 0.0) -> Limit:
    """Return what limits a run.

    What the slowest rank waits is communication; what the others wait beyond that is skew. In the rest of
    the time a rank computes, or waits for its input.

    Args:
        run: its figures.
        uneven: share of the time that all ranks wait until others have submitted, as its timeline shows: now
            this rank is late, now that one. Counters alone take it for communication.
    """
    communication, skew = max(0.0, run.communication - uneven), run.skew
    own = 1 - fmean([one.exposed for one in run.ranks])
    cores = fmean([one.cores for one in run.ranks])
    gpu, step = run.gpu, 1e3 / run.steps_per_second
    of_gpu = f", its GPU is in use for {gpu:.0%}." if gpu is not None else "."
    evidence = [
        f"Communication: even the rank that waits least waits for exchanges {communication:.0%} of a step of "
        f"{step:.3g} ms.",
        f"Skew: the other ranks wait {skew:.0%} of the time beyond that, for the slowest.",
        f"Own work: {own:.0%} of the time, on average. A rank uses {cores:.2f} cores{of_gpu}",
    ]
    if (steps := min(one.steps for one in run.ranks)) < _FEW:
        evidence.append(f"Judged by {steps} step{'s' * (steps > 1)} of a rank: a longer run says more.")
    if uneven >= 0.01:
        text = f"Uneven steps: all ranks wait {uneven:.0%} of the time, now for this rank, now for that one."
        evidence.insert(1, text)
    taken, host = max(((run.taken(one), one) for one in run.hosts if run.in_use(one) > BUSY), default=(0, ""))
    skewed = run.size > 1 and skew >= max(WORTH, communication)
    # For something that is no core, as their input.
    waits = all(_used(one) < NO_CORES for one in ([run.slowest] if skewed else run.ranks))
    if taken >= TAKEN and not (waits and (skewed or max(communication, uneven) < WORTH)):
        return Limit(
            "other programs",
            f"Other programs use {taken:.0%} of the cores of {host}: what limits the run without them is "
            "not known.", "Run it again while they do not run, or on cores of its own.", evidence,
        )  # fmt: skip
    if run.size > 1 and uneven >= max(WORTH, communication, skew) and run.in_use() < BUSY:
        return Limit(
            "skew", "Ranks wait for one another, now for this one and now for that one.",
            "Give all ranks the same to do in each step, such as samples of like length, and to each its own "
            "cores.", evidence,
        )  # fmt: skip
    if skewed:
        return _skew(run, evidence)
    if run.size > 1 and communication >= WORTH:
        last = run.slowest.rows[-1]
        evidence.append(
            f"{last['bytes'] / last['steps'] / 1e6:,.1f} MB are reduced per step. Without waiting for it "
            f"these {run.size} ranks would do what {run.size / max(LEAST, 1 - communication):.3g} do now."
        )
        return Limit(
            "communication", "Ranks wait for exchanges, all of them alike.",
            "Exchange less often: a larger batch on each rank, or backward_passes_per_step=2 in "
            "DistributedOptimizer. Then fewer bytes: compression=hvd.Compression.fp16. On several hosts "
            "`iperf3` measures the network between them.", evidence,
        )  # fmt: skip
    # Ranks that use so few cores wait for something; on a busy host maybe for cores.
    idle = cores / max(own, LEAST) < (NO_CORES if run.in_use() > BUSY else IDLE_CORES)
    if gpu < IDLE_GPU * own if gpu is not None else idle:
        also = again = ""
        if taken >= TAKEN:  # who waits for a core does not compute either
            also = f" Or they wait for cores: other programs use {taken:.0%} of the cores of {host}."
            again = "Run it again while other programs do not run. If ranks do not compute then either: "
        return Limit(
            "input", f"Ranks hardly wait for exchanges or for one another, and yet hardly compute.{also}",
            f"{again}Load in parallel with training: more workers of the data loader, prefetching, files on "
            "a local disk. Measure the loader alone: it must bring more batches per second than "
            f"{run.steps_per_second:.3g}. More ranks do not help before that.", evidence,
        )  # fmt: skip
    return Limit("computation", "Ranks compute most of the time.", _scale(run, evidence), evidence)


def _used(one: Rank) -> float:
    """Return how many cores a rank uses while it does not wait for others."""
    return one.cores / max(1 - one.exposed, LEAST)


def _skew(run: Run, evidence: list[str]) -> Limit:
    slow, cores = run.slowest, fmean([one.cores for one in run.others])
    step = 1e3 / run.steps_per_second
    evidence.append(
        f"Rank {slow.rank} on host {slow.host} waits {slow.exposed:.0%} of the time; its own work takes "
        f"{run.waiting.longer:.1f} times as long as the others': were it as fast, a step would take "
        f"{step * (1 - run.skew):.3g} ms instead of {step:.3g}. It uses {slow.cores:.2f} cores on average, "
        f"the others {cores:.2f}; the cores of its host are in use for {run.in_use(slow.host):.0%}."
    )
    doing = (
        f"It hardly uses its cores: see what rank {slow.rank} waits for, such as its data, a disk or a lock"
        if _used(slow) < IDLE_CORES
        else f"See why rank {slow.rank} has more to do or less to do it with: larger samples, other programs "
        f"on {slow.host}, fewer cores, a hot processor or GPU"
    )
    return Limit(
        "skew", f"The others wait for rank {slow.rank} on host {slow.host}.",
        f"{doing}. `ringdance explain` shows what it does, `ringdance doctor` compares the hosts.", evidence,
    )  # fmt: skip


def is_full(run: Run) -> bool:
    """Return whether a run that computes uses what there is."""
    return run.in_use() >= FULL_CORES if run.gpu is None else run.gpu >= FULL_GPU


def _scale(run: Run, evidence: list[str]) -> str:
    """Return what to try when a run computes: first up, then out."""
    what, used = ("cores", run.in_use()) if run.gpu is None else ("GPUs", run.gpu)
    evidence.append(f"The {what} are in use for {used:.0%}.")
    if is_full(run):
        return (
            f"The {what} are busy. First up: faster {what}, or mixed precision. Then out: more ranks on more "
            "hosts (`ringdance run -H h1:N,h2:N`); `ringdance plan --from RUN_DIR` predicts what they bring."
        )
    how = (
        "give each rank more threads (OMP_NUM_THREADS) or start more ranks on the same hosts. Then out: more "
        "hosts." if run.gpu is None
        else "a larger batch fills them, or more workers of the data loader. Then out: more ranks."
    )  # fmt: skip
    return f"First up: they can do up to {1 / max(used, 0.01):.1f} times as much; {how}"
