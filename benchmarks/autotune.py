"""Compare autotune with a grid of settings: searches from bad and from good settings, in one job.

What: the two PyTorch models of ``ringdance bench train`` on CPUs: the perceptron 784-512-512-10 with batch 64
on each rank, and a convolutional net of 8.5 M parameters with batch 32. First, a grid of batch thresholds,
chunk sizes and overlap on and off is measured in short, alternating blocks of steps. On several hosts the
grid also varies the size of each transfer and whether the ranks of a host reduce first. The slower half of
the settings is dropped repeatedly until few are left. Then autotune starts from bad settings (threshold
64 KiB, chunks 16 KiB, cycle 20 ms, transfers 16 KiB) and from the grid's best settings.

Why: a tuner must come close to the result of a full grid in few steps, and must cost little if there is
nothing to gain.

How to read: "of best" is the step time with the grid's best settings divided by the row's step time, as the
median over pairs of adjacent blocks: 1 is as good as the grid. "after" is the step at which the search ended.
"cost" is the extra time of the first 290 steps with autotune on, from the grid's best settings, compared with
290 steps without autotune, half of them before and half after.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    DEFAULT_MODULE,
    Report,
    alternate,
    ensure_ranks,
    launch_environment,
    milliseconds,
    parser,
    ratio,
    run_rank,
    slowest,
    under_launcher,
)

KB, MB = 1 << 10, 1 << 20
BATCHES = {"mlp": 64, "convnet": 32}
STEPS = 290  # a search must end within this many steps
SETTLE = 5  # steps after which the gradients' fast path is active again when the overlap changes
BLOCK_SECONDS = 0.1
FINALISTS = 4
BEST = "grid's best"
THRESHOLDS, CHUNKS = (64 * KB, MB, 128 * MB), (16 * KB, 64 * KB, 256 * KB, MB, 2 * MB)
WIRES = (64 * KB, 384 * KB, 2 * MB)


@dataclass(frozen=True)
class Setting:
    """The settings of a job: ``EngineValues``, and PyTorch's own values by name (``tunables``)."""

    values: Any
    others: tuple[tuple[str, int], ...]

    def text(self, several_hosts: bool) -> str:
        """Format the settings for a table."""
        value, words = self.values, [f"threshold {size(self.values.fusion_threshold)}"]
        if value.chunk_bytes:
            words.append(f"chunk {size(value.chunk_bytes)}")
        if several_hosts:
            words.append(f"wire {size(value.wire_bytes)}")
            words += ["flat" if value.flat else "hierarchical"] if value.chunk_bytes else []
        return ", ".join([*words, *(f"{name} {number}" for name, number in self.others)])


def size(nbytes: int) -> str:
    """Format a number of bytes."""
    unit, letter = (MB, "M") if nbytes >= MB else (KB, "K")
    return f"{nbytes / unit:g}{letter}"


class Training:
    """One rank's training of a model. Its settings can be changed between steps.

    Args:
        job: Ranks of this run.
        name: Name of the model.
    """

    def __init__(self, job: Any, name: str) -> None:
        import torch

        from ringdance.tools.plan.torch_models import build
        from ringdance.training import session

        torch.manual_seed(0)
        self.job, self.engine = job, session.engine()
        self.engine.on_step = None  # remove the tuner that the job started with
        self.state = self.engine.sets.registered[0].state
        self.model, module = build(name, 32), job.modules[DEFAULT_MODULE]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.optimizer = module.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters()
        )
        shape = (784,) if name == "mlp" else (3, 32, 32)
        self.samples = torch.randn(BATCHES[name], *shape)
        self.labels = torch.randint(0, 10, (BATCHES[name],))
        self.several_hosts = job.about["hosts"] > 1
        self.steps(SETTLE)
        self.start = self.now()
        begin = time.perf_counter()
        self.steps(SETTLE)
        single = max(job.comm.allgather((time.perf_counter() - begin) / SETTLE))
        self.block = max(3, round(BLOCK_SECONDS / single))

    def steps(self, count: int) -> None:
        """Train for ``count`` steps."""
        from torch.nn.functional import cross_entropy

        for _ in range(count):
            self.optimizer.zero_grad()
            cross_entropy(self.model(self.samples), self.labels).backward()
            self.optimizer.step()

    def now(self) -> Setting:
        """Return the current settings."""
        from ringdance.training.tuning.dimensions import tunables

        present = {name: tunable.get() for name, tunable in sorted(tunables.items())}
        return Setting(self.state.values(), tuple((k, n) for k, n in present.items() if n is not None))

    def apply(self, setting: Setting) -> None:
        """Switch to other settings the way the tuner does: by a request that runs with the next exchange."""
        from ringdance.core.request import TUNE_NAME, Collective, Description, Request
        from ringdance.training.tuning.dimensions import tunables

        if setting == self.now():
            return
        self.engine.sets.on_tune = lambda _: setting.values
        switches = setting.others != self.now().others
        for name, number in setting.others:
            tunables[name].set(number)
        request = Request(Description(Collective.TUNE), (np.zeros(1, np.uint8),), name=TUNE_NAME)
        self.engine.submit(request, wake=False)
        self.steps(SETTLE if switches else 2)
        if self.now() != setting:
            raise RuntimeError(f"rank {self.job.rank}: the settings are {self.now()}, not {setting}")

    def turn(self, setting: Setting) -> Callable[[], list[float]]:
        """Return a turn with a block of steps. Its sample is the seconds per step."""

        def turn() -> list[float]:
            self.apply(setting)
            self.job.barrier()
            begin = time.perf_counter()
            self.steps(self.block)
            return [(time.perf_counter() - begin) / self.block]

        return turn

    def tune(self, start: Setting) -> tuple[int, Setting, float]:
        """Train for ``STEPS`` steps with the tuner on.

        Returns:
            The number of steps after which the search ended (0 if it did not), the resulting settings, and
            the seconds for all steps.
        """
        from ringdance.training.tuning import autotune

        self.apply(start)
        autotune._kept.clear()  # forget this process's earlier results
        self.job.barrier()
        begin, ended = time.perf_counter(), 0
        tuner = autotune.tuner_of(self.engine)
        for step in range(1, STEPS + 1):
            self.steps(1)
            if not ended and self.engine.on_step is None:
                ended = step
        seconds = time.perf_counter() - begin
        if tuner is None or not ended:
            self.engine.on_step = None
        return ended, self.now(), slowest(self.job.gather([seconds]))[0]

    def plain(self, steps: int) -> float:
        """Return the seconds for ``steps`` steps without a tuner."""
        self.job.barrier()
        begin = time.perf_counter()
        self.steps(steps)
        return slowest(self.job.gather([time.perf_counter() - begin]))[0]


def grid(training: Training, quick: bool) -> list[Setting]:
    """Return all settings to measure. Thresholds vary only if gradients overlap, where they matter."""
    start, settings = training.start, list[Setting]()
    chunks = CHUNKS[::2] if quick or training.several_hosts else CHUNKS
    chunks = chunks if start.values.chunk_bytes else (0,)  # a rank alone on its host
    ways = [(start.values.wire_bytes, start.values.flat)]
    if training.several_hosts:
        flats = (start.values.flat,) if training.state.exchange.flat is None else (False, True)
        ways = list(product(WIRES, flats))
    for others in product(*(_candidates(name, number) for name, number in start.others)):
        thresholds = THRESHOLDS if ("overlap", 0) not in others else THRESHOLDS[-1:]
        for threshold, chunk, (wire, flat) in product(thresholds, chunks, ways):
            values = start.values._replace(
                fusion_threshold=threshold, chunk_bytes=chunk, wire_bytes=wire, flat=flat
            )
            settings.append(Setting(values, others))
    return settings


def _candidates(name: str, present: int) -> list[tuple[str, int]]:
    """Return the grid's candidates for a PyTorch value: on and off, or one thread and a rank's share."""
    from ringdance.training.tuning.dimensions import tunables

    numbers = {0, 1} if name == "overlap" else {1, present, tunables[name].most()}
    return [(name, number) for number in sorted(numbers)]


def measure_grid(training: Training, report: Report, name: str, arguments: Any) -> Setting:
    """Measure the grid, drop the slower half until few settings are left, and return the best."""
    left = grid(training, arguments.quick)
    report.say(f"\n{name}: {len(left)} settings, blocks of {training.block} steps")
    times: dict[Setting, list[float]] = {setting: [] for setting in left}
    rounds = max(1, (len(left) // FINALISTS).bit_length())
    while True:
        turns = {str(number): training.turn(setting) for number, setting in enumerate(left)}
        samples = alternate(training.job, turns, arguments.seconds / rounds)
        for number, setting in enumerate(left):
            times[setting] += samples[str(number)]
        left.sort(key=lambda setting: statistics.median(times[setting]))
        if len(left) <= FINALISTS:
            break
        left = left[: max(FINALISTS, len(left) // 2)]
    ordered = sorted(times, key=lambda setting: statistics.median(times[setting]))
    rows = []
    for setting in [*left, ordered[len(ordered) // 2], ordered[-1]]:
        text = setting.text(training.several_hosts)
        summary = report.add(f"{name}, grid", "s/step", {text: times[setting]})[text]
        spread = [milliseconds(value) for value in (summary.median, summary.p10, summary.p90)]
        rows.append([text, *spread, str(summary.count)])
    report.table((f"{name}: grid, best, middle and worst", "median ms", "p10", "p90", "blocks"), rows)
    return left[0]


def from_bad(training: Training, report: Report, name: str, best: Setting, arguments: Any) -> None:
    """Start the tuner from bad settings, and compare its choice with the grid's best."""
    start = training.start.values
    chunk, wire = (min(16 * KB, nbytes) for nbytes in (start.chunk_bytes, start.wire_bytes))  # 0 remains 0
    values = start._replace(
        fusion_threshold=64 * KB, cycle_time=20.0, chunk_bytes=chunk, wire_bytes=wire
    )
    bad = Setting(values, training.start.others)
    ends, chosen = [], []
    for _ in range(arguments.searches):
        end, setting, _ = training.tune(bad)
        ends.append(end)
        chosen.append(setting)
    names = [f"search {number}" for number in range(1, len(ends) + 1)]
    everything = {"bad": bad, "defaults": training.start, BEST: best} | dict(
        zip(names, chosen, strict=True)
    )
    turns = {text: training.turn(setting) for text, setting in everything.items()}
    samples = alternate(training.job, turns, arguments.seconds / 2)
    summaries = report.add(f"{name}, from bad settings", "s/step", samples)
    rows = []
    for text, setting in everything.items():
        one = summaries[text]
        share = report.figure(
            f"{name}, from bad settings", f"{text}, of best",
            statistics.median(b / a for a, b in zip(samples[text], samples[BEST], strict=True)),
        )  # fmt: skip
        end = ends[names.index(text)] if text in names else None
        if end is not None:
            report.figure(f"{name}, from bad settings", f"{text}, steps", end)
        rows.append([
            text, setting.text(training.several_hosts), milliseconds(one.median), milliseconds(one.p10),
            milliseconds(one.p90), str(one.count), ratio(share),
            "" if end is None else f"{end} steps" if end else f"not in {STEPS}",
        ])  # fmt: skip
    report.say()
    header = ("settings", "median ms", "p10", "p90", "blocks", "of best", "after")
    report.table((f"{name}: from bad settings", *header), rows)


def from_good(training: Training, report: Report, name: str, best: Setting, arguments: Any) -> None:
    """Measure the cost of the tuner if there is nothing to gain."""
    costs: list[float] = []
    rows = []
    for number in range(1, arguments.searches + 1):
        training.apply(best)
        before = training.plain(STEPS // 2)
        end, setting, seconds = training.tune(best)
        training.apply(best)
        without = before + training.plain(STEPS // 2)
        costs.append(seconds / without - 1)
        report.figure(f"{name}, from good settings", f"search {number}, cost", costs[-1])
        rows.append([
            f"search {number}", setting.text(training.several_hosts), milliseconds(without / STEPS),
            milliseconds(seconds / STEPS), f"{100 * costs[-1]:.1f}%",
            f"{end} steps" if end else f"not in {STEPS}",
        ])  # fmt: skip
    middle = report.figure(f"{name}, from good settings", "cost, median", statistics.median(costs))
    report.say()
    header = ("settings", "ms without", "ms with", "cost", "after")
    report.table((f"{name}: from good settings", *header), rows)
    report.say(f"{name}: tuning from good settings costs {100 * middle:.1f}% of {STEPS} steps")


def start_on_hosts(arguments: Any) -> None:
    """Become the launcher on the named hosts, or run it on hosts created on this machine and exit."""
    line = [sys.executable, "-m", "ringdance", "run", "--no-prefix", "-H"]
    own = [sys.executable, str(Path(__file__).resolve()), *_without_hosts(sys.argv[1:])]
    if arguments.hosts:
        line += [arguments.hosts, *own]
        os.execvpe(line[0], line, launch_environment())
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hosts"))
    from hosts import Hosts, why_not

    if why_not():
        raise SystemExit(f"autotune.py: cannot create hosts: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="tune-") as directory:
        hosts = Hosts(Path(directory) / "net", arguments.make_hosts, rate=arguments.rate)
        try:
            names = ",".join(f"h{number + 1}:{arguments.slots}" for number in range(arguments.make_hosts))
            done = hosts.run("h1", *line, names, *own, timeout=3000.0)
        finally:
            hosts.down()
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    raise SystemExit(done.returncode)


def _without_hosts(words: Sequence[str]) -> list[str]:
    """Return the command line for a rank, without the option that creates hosts."""
    kept, skip = [], False
    for word in words:
        if not skip and word != "--make-hosts" and not word.startswith("--make-hosts="):
            kept.append(word)
        skip = word == "--make-hosts"
    return kept


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "autotune.py", seconds=60)
    add = options.add_argument
    add("--model", choices=BATCHES, nargs="+", default=list(BATCHES), help="which models (default: both)")
    add("--searches", type=int, default=3, help="searches from bad and from good settings (default: 3)")
    add("--quick", action="store_true", help="a small grid, one search, 5 seconds")
    add("-H", dest="hosts", metavar="HOSTS", help="hosts, as for `ringdance run`; replaces --np")
    add("--make-hosts", type=int, metavar="N", help="run on N hosts created on this machine (needs root)")
    add("--slots", type=int, default=1, help="ranks on each created host (default: 1)")
    add("--rate", type=int, default=1000, help="speed of their links in Mbit/s (default: 1000)")
    arguments = options.parse_args()
    if (arguments.hosts or arguments.make_hosts) and not under_launcher():
        start_on_hosts(arguments)
    ensure_ranks(arguments)
    if arguments.quick:
        arguments.searches, arguments.seconds = 1, min(arguments.seconds, 5.0)
    os.environ["RINGDANCE_AUTOTUNE"] = "1"  # memory for chunks of all sizes

    def measure(job: Any) -> None:
        report = Report("autotune", job)
        report.opening()
        for name in arguments.model:
            training = Training(job, name)
            best = measure_grid(training, report, name, arguments)
            from_bad(training, report, name, best, arguments)
            from_good(training, report, name, best, arguments)
            training.apply(training.start)
        report.write(arguments.json)

    run_rank(measure, [DEFAULT_MODULE])


if __name__ == "__main__":
    main()
