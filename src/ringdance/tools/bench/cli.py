"""``ringdance bench input``: use three short runs to find out whether data loading limits training."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot
from statistics import fmean
from typing import Any

from ringdance.core.reports.judging import BUSY, IDLE_CORES, LITTLE, NO_CORES, TAKEN
from ringdance.host.schedulers.detect import detect
from ringdance.host.schedulers.hostfile import hosts_text
from ringdance.launch import subcommands
from ringdance.launch.parser import number, rank_count
from ringdance.launch.remote.shell import add_host_options, hosts_of, ssh_words
from ringdance.launch.spec import CommandError
from ringdance.launch.subcommands import Subcommand
from ringdance.tools.bench.train import TRAIN
from ringdance.tools.report.bottlenecks import Limit

INPUT_MARK = "::ringdance-input::"  # must match ringdance.training.loaders.input_check
PARTS = {"loader": "loader alone", "step": "step alone", "both": "both"}
_LESS = {
    "images": "prepare smaller images (`ringdance data prepare ... --resize 256`)",
    "rows": "prepare files that need no parsing (`ringdance data prepare criteo ... --format rows`)",
    "samples": "compute whatever is the same in every epoch once, before training, and store it",
}
_TAIL = 30  # number of a failed run's last output lines to show

_INPUT = """\
Three runs measure for --seconds each: the loader alone (its batches are read and discarded), the step alone,
and both together. To measure the step alone, up to 48 batches are loaded in advance (for at most --seconds)
and repeated. The noise of a speed is half of its 95% confidence interval, estimated from the variation within
the run. If the loader is hvd.image_loader(...) or hvd.table_loader(...), the script can be measured as it is.
Wrap any other loader once:

  loader = hvd.watch_input(DataLoader(data, batch_size=32))     also for a tf.data pipeline

All ranks of the script must iterate over the loader. The runs end in the middle of an epoch with exit code 0,
so give the script a checkpoint directory that you do not need.

examples:
  ringdance bench input -np 2 -- python train.py --data /scratch/imagenet
  ringdance bench input -H node1:4,node2:4 --seconds 20 -- python train.py
  ringdance bench input -np 4 --json -- python train.py

exit code: 0 if all three runs were measured, otherwise the failed run's exit code, or 2"""


@dataclass(frozen=True)
class Speed:
    """The measured speed of one run: the loader alone, the training step alone, or both.

    Attributes:
        unit: Plural noun for the loader's samples: images, rows or samples.
        samples_per_second: Total speed if every rank were as slow as the slowest rank.
        noise: Half-width of the 95% confidence interval of the speed, as a fraction of the speed.
        slowest: The slowest rank.
        behind: How much slower the slowest rank is than the average rank, as a share of the average speed.
        cores: Number of cores used by the slowest rank, including its data loader processes.
        cores_of_mean: Mean number of cores used per rank.
        usable: Number of cores available to the slowest rank.
        host_busy: CPU utilization of the slowest rank's host, including all programs.
        by_others: Share of the CPU time on the slowest rank's host that programs other than the ranks use.
    """

    unit: str
    samples_per_second: float
    noise: float
    slowest: int
    behind: float
    cores: float
    cores_of_mean: float
    usable: float
    host_busy: float
    by_others: float

    @property
    def is_busy(self) -> bool:
        """True if hardly any core is idle, either on the host or among the slowest rank's cores."""
        return self.host_busy >= BUSY or self.cores >= BUSY * self.usable

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Speed:
        """Combine all ranks' measurements of one run."""
        speeds = [row["samples"] / row["seconds"] for row in rows]
        least, mean = min(speeds), fmean(speeds)
        slowest = speeds.index(least)
        row = rows[slowest]
        own = sum(other["cores"] for other in rows if other["host"] == row["host"]) / row["host_cores"]
        return cls(
            str(row["unit"]), least * len(rows), row["noise"], slowest, 1 - least / mean, row["cores"],
            fmean(one["cores"] for one in rows), row["usable"], row["host_busy"],
            max(0.0, row["host_busy"] - own),
        )  # fmt: skip


def judge(speeds: Mapping[str, Speed]) -> Limit:
    """Decide from the speeds of the three runs what limits training.

    Returns:
        A limit whose bound is "loader", "step", "cores" (loader and step compete for cores), "order" (loader
        and step take turns) or "unclear" (for example, the speeds differ by less than their noise).
    """
    loader, step, both = (speeds[part].samples_per_second for part in PARTS)
    alone = speeds["loader"]
    pace = f"{alone.unit}/s"
    all_three = (
        f"the loader alone delivers {loader:,.1f} {pace}, the step alone processes {step:,.1f}, and both "
        f"together reach {both:,.1f}"
    )
    taken = max((speed.by_others for speed in speeds.values() if speed.host_busy >= BUSY), default=0.0)
    disturbed = taken >= TAKEN
    # A loader that uses hardly any CPU time is waiting, even if other programs keep the cores busy.
    waits = max(loader, both) < step * (1 - LITTLE) and alone.cores < NO_CORES
    slow = loader < step * (1 - LITTLE) and (both >= loader * 0.7 or (disturbed and waits))
    if disturbed and not waits:
        return Limit(
            "unclear",
            f"Other programs use {taken:.0%} of a host's cores, and hardly any core is idle: {all_three}. "
            "The speeds without these programs are not known.",
            "Measure again while nothing else is running on the hosts.",
        )
    noise, other = (hypot(speeds[part].noise, speeds["step"].noise) for part in ("both", "loader"))
    fast = step / (step + loader) < LITTLE  # loading takes hardly any time, even if it does not overlap
    if (noise >= max(LITTLE, 1 - both / step) and not fast) or (slow and other >= 1 - loader / step):
        return Limit(
            "unclear", f"The speeds differ by less than their noise, {max(noise, other):.0%}: {all_three}.",
            "Measure longer (--seconds) while nothing else is running on the hosts.",
        )  # fmt: skip
    if both >= step * (1 - (max(LITTLE, noise) if fast else LITTLE)):
        return Limit(
            "step",
            f"The input is not the limit: the loader waits for the step, which processes {step:,.1f} {pace}. "
            f"The loader alone can deliver {loader:,.1f}, which is {loader / step:.1f} times as many.",
            "Make the step faster (a larger batch, 16-bit floating point, more ranks: `ringdance report` "
            "shows what limits it). If the speed is sufficient, nothing needs to change.",
        )
    if slow:
        return Limit(
            "loader",
            f"The step waits for the loader {1 - both / step:.0%} of the time: {all_three}. With a loader "
            f"that keeps up, training would be {step / both:.1f} times as fast.", _faster_loader(alone),
        )  # fmt: skip
    return _competing(speeds, all_three)


def _competing(speeds: Mapping[str, Speed], all_three: str) -> Limit:
    """Return what limits training if the loader and the step are each fast enough alone, but not together.

    Args:
        speeds: Speeds of the three runs.
        all_three: Text that states all three speeds.
    """
    less = _LESS[speeds["loader"].unit]
    loader, step, both = (speeds[part].samples_per_second for part in PARTS)
    if not speeds["both"].is_busy and loader > both:
        return Limit(
            "order",
            f"Loader and step take turns although cores are idle: {all_three}. With batches prepared in "
            f"advance, training would be {min(loader, step) / both:.1f} times as fast.",
            "Let the loader work ahead in threads or processes: use one of Ringdance's loaders, a DataLoader "
            "with num_workers=1 or more, or a tf.data pipeline that ends with prefetch().",
        )
    return Limit(
        "cores",
        f"Loader and step compete for the cores: {all_three}. Without the loader's work, training would be "
        f"{step / both:.1f} times as fast.",
        f"Give the loader less work: {less}. Alternatively, give each rank more cores, or use fewer threads "
        "for the loader (threads=, num_workers=).",
    )


def _faster_loader(alone: Speed) -> str:
    """Return advice on how to speed up a loader that limits training."""
    less = _LESS[alone.unit]
    used = f"it uses {alone.cores:.1f} of {alone.usable:.1f} cores"
    waits = "for a disk, a network, a lock or a sleep"
    shown = "`ringdance explain` shows the line of code."
    if alone.behind > LITTLE:
        who = (
            f"Rank {alone.slowest} holds the others up: its loader is {alone.behind:.0%} slower than average"
        )
        if alone.cores < max(IDLE_CORES, alone.cores_of_mean * (1 - LITTLE)):
            return f"{who}, and waits ({used}; the mean is {alone.cores_of_mean:.1f}) {waits}. {shown}"
        return f"{who}, and computes ({used}): its samples are larger, or its cores are slower or shared."
    if alone.cores >= BUSY * alone.usable:
        return (
            f"Loading alone keeps a rank's cores busy ({used}): {less}, or use machines with more cores per "
            "rank."
        )
    threads = "threads= for Ringdance's loaders, num_workers= for a DataLoader"
    if alone.cores >= IDLE_CORES:
        return f"Loading leaves cores idle ({used}): use more threads or processes ({threads}), or {less}."
    return (
            f"The loader waits most of the time ({used}) {waits}. If reading is slow, read more files in "
            f"parallel ({threads}), or read from a local disk (`ringdance hosts copy`). {shown}"
    )


def table(speeds: Mapping[str, Speed]) -> str:
    """Format the speeds of the runs as a text table."""
    lines = [f"{'':14}{speeds['loader'].unit + '/s':>14}{'+-':>6}{'cores per rank':>18}{'hosts busy':>12}"]
    for part, title in PARTS.items():
        one = speeds[part]
        cores = f"{one.cores:.1f} of {one.usable:.1f}"
        rate = f"{one.samples_per_second:,.1f}"
        lines.append(f"{title:14}{rate:>14}{one.noise:>6.1%}{cores:>18}{one.host_busy:>12.0%}")
    return "\n".join(lines)


def measure(part: str, words: Sequence[str], seconds: float) -> Speed:
    """Measure ``part`` (see ``PARTS``) in a job that ``ringdance run`` starts with the arguments ``words``.

    Raises:
        CommandError: The job failed, or ended before the measurement was complete.
    """
    environ = os.environ | {
        "RINGDANCE_INPUT_CHECK": part, "RINGDANCE_INPUT_CHECK_TIME": str(seconds),
        "RINGDANCE_SUMMARY_TIME": "0", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    line = [sys.executable, "-m", "ringdance", "run", "--output-json", *words]
    last, speed = deque[str](maxlen=_TAIL), None
    with subprocess.Popen(
        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout
        for text in process.stdout:
            try:
                row = json.loads(text)
                text = f"[{row['rank']}] {row['text']}\n"
                if row["text"].startswith(INPUT_MARK):
                    speed = Speed.of(json.loads(row["text"].removeprefix(INPUT_MARK)))
                    continue
            except (ValueError, KeyError, TypeError):  # not JSON, because the launcher wrote this line
                pass
            last.append(text)
    if speed is None or process.returncode:
        why = f"failed with exit code {process.returncode}" if process.returncode else (
            "ended before the measurement was complete. Make sure that it trains for enough epochs, that its "
            "loader is one of Ringdance's or wrapped by hvd.watch_input(loader), and that its main thread "
            "iterates over the loader."
        )  # fmt: skip
        shown = "".join(last) or "(none)\n"
        raise CommandError(
            f"the run with {PARTS[part]} {why}\nLast lines of its output:\n{shown.rstrip()}",
            process.returncode or 2,
        )
    return speed


def _input(arguments: argparse.Namespace) -> int:
    if not arguments.words:
        raise CommandError(
            "the training command is missing. Pass it after --, as in: "
            "ringdance bench input -np 2 -- python train.py"
        )
    options = ["-np", str(arguments.np)] if arguments.np else []
    if hosts := hosts_of(arguments):
        options += ["-H", hosts_text(hosts)]
    if not options and detect(os.environ) is None:
        options = ["-np", "1"]
    options += [*ssh_words(arguments), *(f"-x{export}" for export in arguments.x)]
    speeds = {}
    for place, (part, title) in enumerate(PARTS.items(), 1):
        print(f"{place} of 3: {title}, about {1.3 * arguments.seconds:.0f} s ...", file=sys.stderr)
        speeds[part] = measure(part, [*options, *arguments.words], arguments.seconds)
    limit = judge(speeds)
    if arguments.json:
        print(json.dumps({part: asdict(speed) for part, speed in speeds.items()} | asdict(limit), indent=1))
    else:
        print(f"{table(speeds)}\n\n{textwrap.fill(limit.sentence, 100)}")
        print(textwrap.fill(f"Try next: {limit.next_step}", 100))
    return 0


def _add_input(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of ranks (default: the hosts' slots, or 1)"
    add("-np", "-n", type=rank_count, metavar="N", help=text)
    add_host_options(parser, "hosts and their slots (default: 1 slot per host)")
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable for all ranks")
    text = "seconds to measure in each run, after a warm-up (default: 8)"
    add("--seconds", type=number, default=8.0, metavar="S", help=text)
    add("--json", action="store_true", help="print JSON")
    add("words", nargs=argparse.REMAINDER, metavar="-- CMD", help="training command and its arguments")


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance bench`` with the arguments ``argv``. Returns the exit code."""
    text = "find out whether the loader or the training step limits training"
    known = {"input": Subcommand(_input, text, _add_input, _INPUT), "train": TRAIN}
    return subcommands.run("ringdance bench", "Measure training with short runs.", known, argv)
