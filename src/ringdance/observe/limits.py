"""What limits a run: input, computation, communication or skew."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ringdance.observe.figures import Run

WORTH = 0.2  # share of the time above which waiting limits a run
_BUSY_CORES = 0.5  # below it a rank that does not wait for others waits for something else
_FEW_CORES = 0.15  # the same on a host whose cores are all busy
_BUSY_HOST, _BUSY_GPU = 85.0, 50.0  # percent
_TAKEN = 20.0  # percent of a host's cores that other programs use, from which on they may be the cause


@dataclass(frozen=True)
class Limit:
    """What limits a training.

    Attributes:
        bound: in a word.
        sentence: the same in a sentence.
        next_step: the one thing to try.
    """

    bound: str
    sentence: str
    next_step: str


@dataclass(frozen=True)
class RunLimit(Limit):
    """What limits a run: input, computation, communication or skew.

    Attributes:
        evidence: the numbers.
    """

    evidence: list[str]


def judge(run: Run, uneven: float = 0.0) -> RunLimit:
    """Return what limits a run.

    All ranks end an exchange together, so the slowest rank waits least. What it waits is communication; what
    the others wait beyond that is skew. In the rest of the time a rank computes, or waits for its input.

    Args:
        run: its figures.
        uneven: share of the time that all ranks wait until others have submitted, as its timeline shows: now
            this rank is late, now that one. Counters alone take it for communication.
    """
    communication, skew = max(0.0, run.communication - uneven), run.skew
    own = 1 - fmean([one.exposed for one in run.ranks])
    cores = fmean([one.cores for one in run.ranks])
    gpus = [one.gpu for one in run.ranks if one.gpu is not None]
    gpu = fmean(gpus) if gpus else None
    evidence = [
        f"Communication: even the rank that waits least waits for exchanges {communication:.0%} of the time.",
        f"Skew: the other ranks wait {skew:.0%} of the time beyond that, for the slowest.",
        f"Own work: {own:.0%} of the time, on average. A rank uses {cores:.2f} cores"
        + (f", its GPU is in use for {gpu:.0f}%." if gpu is not None else "."),
    ]
    if uneven >= 0.01:
        text = f"Uneven steps: all ranks wait {uneven:.0%} of the time, now for this rank, now for that one."
        evidence.insert(1, text)
    busy = [one for one in run.hosts if run.mean("host_cpu_percent", one) > _BUSY_HOST]
    taken, host = max(((_by_others(run, one), one) for one in busy), default=(0.0, ""))
    skewed = run.size > 1 and skew >= max(WORTH, communication)
    blamed = [run.slowest] if skewed else run.ranks
    # For something that is no core, as their input.
    waits = all(one.cores / max(1 - one.exposed, 0.05) < _FEW_CORES for one in blamed)
    if taken >= _TAKEN and not (waits and (skewed or max(communication, uneven) < WORTH)):
        return RunLimit(
            "other programs",
            f"Other programs use {taken:.0f}% of the cores of {host}: what limits the run without them is "
            "not known.", "Run it again while they do not run, or on cores of its own.", evidence,
        )  # fmt: skip
    if run.size > 1 and uneven >= max(WORTH, communication, skew) and _host_cpu(run) < _BUSY_HOST:
        return RunLimit(
            "skew", "Ranks wait for one another, now for this one and now for that one.",
            "Give all ranks the same to do in each step, such as samples of like length, and to each its own "
            "cores.", evidence,
        )  # fmt: skip
    if skewed:
        return _skew(run, evidence)
    if run.size > 1 and communication >= WORTH:
        last = run.slowest.rows[-1]
        sent = last["bytes"] / last["steps"]
        evidence.append(f"{sent / 1e6:,.1f} MB are reduced per step.")
        return RunLimit(
            "communication", "Ranks wait for exchanges, all of them alike.",
            "Exchange less often: a larger batch on each rank, or backward_passes_per_step=2 in "
            "DistributedOptimizer. Then fewer bytes: compression=hvd.Compression.fp16. On several hosts "
            "`ringdance doctor` measures the network between them.", evidence,
        )  # fmt: skip
    if gpu < _BUSY_GPU * own if gpu is not None else _is_idle(run, cores / max(own, 0.05)):
        also = again = ""
        if taken >= _TAKEN:  # who waits for a core does not compute either
            also = f" Or they wait for cores: other programs use {taken:.0f}% of those of {host}."
            again = "Run it again while other programs do not run. If ranks do not compute then either: "
        return RunLimit(
            "input", f"Ranks hardly wait for exchanges or for one another, and yet hardly compute.{also}",
            f"{again}Load in parallel with training: more workers of the data loader, prefetching, files on "
            "a local disk. Measure the loader alone: it must bring more batches per second than "
            f"{run.steps_per_second:.3g}. More ranks do not help before that.", evidence,
        )  # fmt: skip
    return RunLimit("computation", "Ranks compute most of the time.", _scale(run, gpu), evidence)


def _is_idle(run: Run, used: float) -> bool:
    """Return whether ranks that use so many cores wait for something; not for the cores of a busy host."""
    return used < (_FEW_CORES if _host_cpu(run) > _BUSY_HOST else _BUSY_CORES)


def _host_cpu(run: Run) -> float:
    """Return in percent how far the cores of the busiest host are in use."""
    return max(run.mean("host_cpu_percent", host) for host in run.hosts)


def _by_others(run: Run, host: str) -> float:
    """Return in percent how far programs that are no ranks of the run use a host's cores."""
    cores = run.mean("host_cores", host)
    used = sum(one.cores for one in run.ranks if one.host == host)
    return run.mean("host_cpu_percent", host) - 100 * used / cores if cores else 0.0


def _skew(run: Run, evidence: list[str]) -> RunLimit:
    slow = run.slowest
    cores = fmean([one.cores for one in run.others])
    host = run.mean("host_cpu_percent", slow.host)
    longer = (1 - slow.exposed) / max(fmean([1 - one.exposed for one in run.others]), 0.05)
    used = slow.cores / max(1 - slow.exposed, 0.05)
    evidence.append(
        f"Rank {slow.rank} on host {slow.host} waits {slow.exposed:.0%} of the time; its own work takes "
        f"{longer:.1f} times as long as that of the others. It uses {slow.cores:.2f} cores on average, "
        f"the others {cores:.2f}; the cores of its host are in use for {host:.0f}%."
    )
    doing = (
        f"It hardly uses its cores: see what rank {slow.rank} waits for, such as its data, a disk or a lock"
        if used < _BUSY_CORES
        else f"See why rank {slow.rank} has more to do or less to do it with: larger samples, other programs "
        f"on {slow.host}, fewer cores, a hot processor or GPU"
    )
    return RunLimit(
        "skew", f"The others wait for rank {slow.rank} on host {slow.host}.",
        f"{doing}. `ringdance explain` shows what it does, `ringdance doctor` compares the hosts.", evidence,
    )  # fmt: skip


def _scale(run: Run, gpu: float | None) -> str:
    """Return what to try when a run computes: first up, then out."""
    busiest = _host_cpu(run)
    if gpu is not None and gpu < 90:
        return (
            f"First up: the GPUs are in use for {gpu:.0f}% only; a larger batch fills them, or more workers "
            "of the data loader. Then out: more ranks."
        )
    if gpu is None and busiest < 75:
        return (
            f"First up: {100 - busiest:.0f}% of the cores are free; give each rank more threads "
            "(OMP_NUM_THREADS) or start more ranks on the same hosts. Then out: more hosts."
        )
    what = "GPUs" if gpu is not None else "cores"
    return (
        f"The {what} are busy. First up: faster {what}, or mixed precision. Then out: more ranks on more "
        "hosts (`ringdance run -H h1:N,h2:N`); `ringdance report` of both runs shows what they bring."
    )
