"""The cost of a timeline: a perceptron's training step and ResNet-50's gradients, with and without one.

What: blocks of steps of ``training_step.py``'s perceptron and bursts of ``resnet50_gradients.py`` alternate
between recording everything that a timeline shows and recording only the records that are always kept. The
timeline is written all the time, as in a long run: the monitor reads records and converts some of them.

Why: monitoring must not slow down training.

How to read: the ratio is the median over adjacent pairs, with the 95 % interval of this median (bootstrap).
1.02 means that the timeline costs 2 % of a step. A burst has no computation at all, so it is the worst case.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import resnet50_gradients
import training_step
from common import DEFAULT_MODULE, Report, alternate, ensure_ranks, parser, run_rank

OFF, ON = "timeline off", "timeline on"
BURSTS = 5
SAMPLES = 2000


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median (bootstrap)."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (SAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def switched(words: Any, detail: int, turn: Callable[[], list[float]]) -> Callable[[], list[float]]:
    """Return a turn that records with this detail, using the switch behind ``RINGDANCE_TIMELINE_STEPS``."""
    from ringdance.core.ring import Word

    def switched_turn() -> list[float]:
        words[Word.DETAIL] = detail
        return turn()

    return switched_turn


def compare(job: Any, report: Report, group: str, turn: Callable[[], list[float]], seconds: float) -> None:
    """Measure a turn with and without a timeline, and print the ratio."""
    from ringdance.training import session

    words = session.engine().recorder.words
    turns = {OFF: switched(words, 0, turn), ON: switched(words, 1, turn)}
    samples = alternate(job, turns, seconds)
    summaries = report.add(group, "s", samples)
    ratios = [on / off for off, on in zip(samples[OFF], samples[ON], strict=True)]
    low, high = interval(ratios)
    middle = report.figure(group, f"{ON} / {OFF}", statistics.median(ratios))
    report.figure(group, "95 % interval, low", low)
    report.figure(group, "95 % interval, high", high)
    times = [f"{summaries[name].median * 1e3:.3f}" for name in (OFF, ON)]
    report.table(
        (group, "off ms", "on ms", "on / off", "95 % interval", "pairs"),
        [["median", *times, f"{middle:.4f}", f"{low:.4f} to {high:.4f}", str(len(ratios))]],
    )


def main() -> None:
    """Parse the arguments, start ranks, measure."""
    options = parser(__doc__, "timeline.py", seconds=30)
    arguments = options.parse_args()
    ensure_ranks(arguments)
    os.environ["RINGDANCE_TIMELINE"] = "DYNAMIC"

    def measure(job: Any) -> None:
        job.gloo()
        report = Report("the cost of a timeline", job)
        report.opening()
        module = job.modules[DEFAULT_MODULE]
        with tempfile.TemporaryDirectory() as directory:
            module.start_timeline(str(Path(directory) / "timeline.json"))
            steps = training_step.trainers(job, training_step.WORKLOADS["mlp"])[DEFAULT_MODULE][1]
            count = training_step.steps_in_block(job, steps)
            turn = training_step.block(steps, count)
            compare(job, report, f"MLP, step ({count} in a block)", turn, arguments.seconds)
            _, bursts = resnet50_gradients.contestants(job, 256 << 10, backward=True)

            def block() -> list[float]:
                times = [resnet50_gradients.timed(bursts[DEFAULT_MODULE])()[0] for _ in range(BURSTS)]
                return [statistics.mean(times)]

            compare(job, report, "ResNet-50's gradients, burst", block, arguments.seconds)
            module.stop_timeline()
        report.write(arguments.json)

    run_rank(measure, [DEFAULT_MODULE])


if __name__ == "__main__":
    main()
