"""Read a run's metrics from ``metrics-*.jsonl`` in its output directory."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ringdance.core.reports.judging import Waiting, waiting
from ringdance.errors import LaunchError
from ringdance.host.files import NO_FORMAT, read_regular, typed

Row = dict[str, Any]
_GAUGES = ("last_step_time", "host_cpu_percent", "host_memory_percent", "host_cores", "gpu_percent")
_FIELDS = {
    "host": str, **dict.fromkeys(("rank", "pid", "size", "steps", "bytes", "rss_bytes"), int),
    **dict.fromkeys(("time", "exposed_seconds", "cpu_seconds", *_GAUGES), float),
}  # fmt: skip


@dataclass
class Rank:
    """The metrics of one rank in a run.

    Attributes:
        rows: Samples of the metrics in chronological order.
        steps: Number of measured steps. The first step, which may include compilation, is usually excluded.
        step_seconds: Mean duration of a step in seconds.
        exposed: Share of the time that training spends waiting for exchanges.
        training: Samples that were taken during the measured steps.
        cores: Mean number of cores used by the rank's process and its children.
        gpu: Mean GPU utilization in percent, or None without a GPU.
    """

    rank: int
    host: str
    rows: list[Row]
    training: list[Row]
    steps: int
    step_seconds: float
    exposed: float
    cores: float
    gpu: float | None

    @classmethod
    def of(cls, rows: list[Row]) -> Rank | None:
        """Compute a rank's metrics from its samples. Returns None if no step was measured."""
        # End at the first sample that includes all steps, because saving or evaluation may follow them.
        last = next(row for row in rows if row["steps"] == rows[-1]["steps"])
        stepped = [row for row in rows if row["steps"] and row["steps"] < last["steps"]]
        # Start after the first step, which often includes compilation, unless the run is too short to have
        # samples between its first and last steps.
        first = stepped[0] if stepped else rows[0]
        steps = last["steps"] - first["steps"]
        seconds = last.get("last_step_time", 0) - first.get("last_step_time", first["time"])
        if steps < 1 or seconds <= 0:
            return None
        exposed = (last["exposed_seconds"] - first["exposed_seconds"]) / seconds
        cores = (last["cpu_seconds"] - first["cpu_seconds"]) / max(1e-3, last["time"] - first["time"])
        training = rows[rows.index(first) + 1 : rows.index(last) + 1]
        gpu = [row["gpu_percent"] for row in training if "gpu_percent" in row]
        return cls(
            last["rank"], last["host"], rows, training, steps, seconds / steps,
            min(1.0, max(0.0, exposed)), cores, fmean(gpu) if gpu else None,
        )  # fmt: skip

    def rates(self) -> list[tuple[float, float]]:
        """Return pairs of Unix time and steps per second. Short intervals, such as the last, are merged."""
        points = [(float(row.get("last_step_time") or row["time"]), row["steps"]) for row in self.rows]
        lengths = [b - a for (a, _), (b, _) in itertools.pairwise(points) if b > a]
        chosen = points[:1]
        for point in points[1:]:
            if point[0] - chosen[-1][0] >= median(lengths or [0.0]) / 2 > 0:
                chosen.append(point)
        chosen[1:] = chosen[1:-1] + [points[-1]] * (len(chosen) > 1)
        return [(b, (done - before) / (b - a)) for (a, before), (b, done) in itertools.pairwise(chosen)]


@dataclass
class RunMetrics:
    """The metrics of a run.

    Attributes:
        seconds: Seconds between the first and the last sample.
        steps_per_second: Steps per second. Not a sum over ranks, because every step involves all ranks.
    """

    directory: Path
    ranks: list[Rank]

    @property
    def size(self) -> int:
        return int(self.ranks[0].rows[-1]["size"])

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def seconds(self) -> float:
        times = [row["time"] for rank in self.ranks for row in (rank.rows[0], rank.rows[-1])]
        return float(max(times) - min(times))

    @property
    def steps_per_second(self) -> float:
        return 1 / median([rank.step_seconds for rank in self.ranks])

    @property
    def waiting(self) -> Waiting:
        """How long the ranks wait for exchanges and for each other."""
        return waiting([rank.exposed for rank in self.ranks])

    @property
    def slowest(self) -> Rank:
        return self.ranks[self.waiting.slowest]

    @property
    def gpu(self) -> float | None:
        """Mean utilization of the ranks' GPUs, from 0 to 1, or None without GPUs."""
        uses = [rank.gpu for rank in self.ranks if rank.gpu is not None]
        return fmean(uses) / 100 if uses else None

    def in_use(self, host: str = "") -> float:
        """Return the share of a host's usable cores that is busy, from 0 to 1. Default: the busiest host."""
        return max(self.mean("host_cpu_percent", name) for name in ([host] if host else self.hosts)) / 100

    def taken(self, host: str) -> float:
        """Return the share of a host's usable cores that is used by programs other than the run's ranks."""
        cores = self.mean("host_cores", host)
        used = sum(rank.cores for rank in self.ranks if rank.host == host)
        return self.in_use(host) - used / cores if cores else 0.0

    def mean(self, key: str, host: str = "") -> float:
        """Return the mean of gauge ``key`` over the training samples from ``host``. Default: all hosts."""
        rows = [row for rank in self.ranks if host in ("", rank.host) for row in rank.training if key in row]
        return fmean([row[key] for row in rows]) if rows else 0.0


def _read(file: Path) -> Iterator[Row]:
    """Yield the samples in a file. Skips truncated lines, which a full disk can cause, with a warning."""
    for number, line in enumerate(read_regular(file).splitlines(), 1):
        try:
            row = json.loads(line)
            known = dict.fromkeys(_GAUGES, 0.0) | row  # gauges are optional
            for key, kind in _FIELDS.items():
                typed(known, key, kind)
        except json.JSONDecodeError:
            print(f"ringdance report: skipping truncated line {number} of {file}", file=sys.stderr)
            continue
        except NO_FORMAT:
            raise LaunchError(
                f"line {number} of {file} was not written by `ringdance run --output-filename`: "
                f"{line[:40]!r}. Remove this line, or run the job again."
            ) from None
        yield row


def read_run(directory: Path) -> RunMetrics:
    """Read a run's metrics. Raises LaunchError if metrics are missing, or if no step was measured."""
    files = sorted(directory.glob("metrics-*.jsonl"))
    if not files:
        what = "has no metrics-*.jsonl" if directory.is_dir() else "is not a directory"
        advice = "start the job with `ringdance run --output-filename DIR`"
        if any(directory.glob("rank.*")):  # the job used --output-filename
            advice = "its ranks have not completed a call to hvd.init()"
            outputs = [read_regular(path).strip() for path in sorted(directory.glob("rank.*/stderr"))]
            if end := next((text.splitlines()[-1] for text in outputs if text), ""):
                advice = f"a rank's stderr ends with {end[-300:]!r}. If that is not the reason, {advice}"
        raise LaunchError(f"{directory} {what}: {advice}")
    rows = sorted((row for file in files for row in _read(file)), key=itemgetter("time"))
    processes: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    last: dict[int, list[Row]] = {}  # samples from the last process of each rank
    for row in rows:
        last[row["rank"]] = own = processes[row["rank"], row["host"], row["pid"]]
        own.append(row)
    # Skip ranks beyond the run's final size. Their files may be from hosts that have left or an earlier run.
    known = sorted(rank for rank in last if rank < rows[-1]["size"])
    ranks = [measured for rank in known if (measured := Rank.of(last[rank]))]
    if not ranks:
        if not any(row["steps"] for row in rows):
            why = "has marked a step. Use DistributedOptimizer, or call hvd.mark_step() after each step"
        else:
            seconds = rows[-1]["time"] - rows[0]["time"]
            interval = min(1.0, max(0.01, seconds / 10))
            why = (
                f"has taken steps between two samples, because the run took only {seconds:.1f} s. Let it run "
                f"longer, or take samples more often: RINGDANCE_METRICS_INTERVAL={interval:.1g}"
            )
        raise LaunchError(f"{directory}: no rank {why}")
    return RunMetrics(directory, ranks)
