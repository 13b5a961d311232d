"""Show the measurements of compare.py as a table, as curves, and as advice derived from the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringdance.tools.report import svg

_EQUAL_AUC = 0.002  # AUCs that differ by less count as equal, if there are _EQUAL_ROWS validation rows
_EQUAL_ROWS = 30_000
_SHORT = 5.0  # seconds of training below which speeds are not meaningful
_DISTURBED = 0.2  # share of cores in use by other programs above which results cannot be compared
_CLOSE = 1.1  # speeds within this factor do not justify a change
_NAMES = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


@dataclass
class Result:
    """The results of a strategy.

    Attributes:
        framework, strategy: Names of the framework and the strategy.
        settings: Settings that all results must share.
        error: Reason for missing results, or "".
        processes: Number of processes on all hosts.
        threads: Numbers of threads chosen by a trial.
        warm: Rows trained before the clock started.
        validation: Number of validation rows for the AUC.
        cores_busy: Average number of cores used by all processes while training.
        others: Cores used by other programs during that time, if all processes were on one host.
        memory: Sum of the processes' peak memory in bytes, without pages of mapped files.
        startup: Seconds from the command until the clock started.
        curve: Rows, seconds of training, AUC and log-loss on the validation part.
    """

    framework: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    processes: int = 0
    threads: str = ""
    warm: int = 0
    validation: int = 0
    cores_busy: float = 0.0
    others: float = 0.0
    memory: int = 0
    startup: float = 0.0
    curve: list[list[float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Names of the framework and the strategy."""
        return f"{_NAMES[self.framework]} {self.strategy}"

    @property
    def speed(self) -> float:
        """Samples per second."""
        samples, seconds = self.curve[-1][:2]
        return (samples - self.warm) / seconds

    @property
    def work(self) -> float:
        """Processor seconds per 1,000 samples."""
        return 1000 * self.cores_busy / self.speed

    def auc(self, axis: int, value: float) -> float:
        """Return the AUC of the evaluation nearest to ``value`` samples (axis 0) or seconds (axis 1).

        There is no interpolation, because the AUC between two evaluations is unknown.
        """
        return min(self.curve, key=lambda point: abs(point[axis] - value))[2] if value else 0.5


def common(results: Iterable[Result]) -> tuple[float, float]:
    """Return the largest number of samples after which all were evaluated, and the shortest training time."""
    curves = [result.curve for result in results if not result.error]
    same = set.intersection(*({point[0] for point in curve} for curve in curves))
    return max(same, default=0.0), min(curve[-1][1] for curve in curves)


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table by framework, the fastest strategy first."""
    measured = [one for one in results if not one.error]
    samples, seconds = common(measured) if measured else (0, 0)
    heads = [
        "strategy", "processes", "samples/s", "cores busy", "CPU s per 1,000", "memory, GB",
        f"AUC after {samples:,} rows", f"AUC after {seconds:.3g} s", "start, s",
    ]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in sorted(measured, key=lambda one: (one.framework, -one.speed)):
        cells = [
            one.name + (f" (threads {one.threads})" if one.threads else ""), f"{one.processes}",
            f"{one.speed:,.0f}", f"{one.cores_busy:.2f}", f"{one.work:.3f}", f"{one.memory / 1e9:.2f}",
            f"{one.auc(0, samples):.4f}", f"{one.auc(1, seconds):.4f}", f"{one.startup:.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    failed = [
        f"| {one.name} | failed: {one.error.replace('|', '/')} |" + " |" * 7 for one in results if one.error
    ]
    return "\n".join([*lines, *failed]) + "\n"


def curves(results: Sequence[Result], file: Path) -> None:
    """Draw AUC over rows and over time for each framework. Writes no file if there are no results."""
    panels, x_labels = {}, []
    axes = ((0, 1000, "rows", "thousand rows"), (1, 1, "time", "seconds of training"))
    for framework, title in _NAMES.items():
        chosen = [result for result in results if result.framework == framework and not result.error]
        for axis, scale, word, label in axes if chosen else ():
            x_labels.append(label)
            panels[f"{title}, by {word}"] = {
                one.strategy: [(point[axis] / scale, point[2]) for point in one.curve] for one in chosen
            }
    y_labels = ["AUC on the validation part"] * len(panels)
    if panels:
        svg.write(file, panels, x_labels, y_labels, from_zero=False)


def advice(results: Sequence[Result]) -> str:
    """Return advice: which strategy to use, and why the others are slower or less accurate."""
    lines = []
    for framework, title in _NAMES.items():
        chosen = [result for result in results if result.framework == framework]
        measured = [result for result in chosen if not result.error]
        if measured:
            lines += [*_of_framework(title, measured), ""]
        lines += [f"{result.name} failed: {result.error}" for result in chosen if result.error]
    return "\n".join(lines).strip() + "\n"


def _of_framework(title: str, measured: Sequence[Result]) -> list[str]:
    samples, seconds = common(measured)
    highest, equal = max(result.auc(0, samples) for result in measured), _equal(measured)
    good = [result for result in measured if result.auc(0, samples) >= highest - equal]
    best = max(good, key=lambda one: one.speed)
    cores, others = best.settings.get("cores", 0), max(result.others for result in measured)
    figures = (
        f"{best.speed:,.0f} samples/s with {best.cores_busy:.1f} of {cores} cores busy, AUC "
        f"{best.auc(0, samples):.4f} after {samples:,} rows."
    )
    if others > _DISTURBED * cores:
        return [
            f"{title}: other programs used up to {others:.1f} of {cores} cores meanwhile, so the results do "
            "not show which strategy is best. Run it again (--again) while nothing else is running."
        ]
    lines = [f"{title}: {'use ' if len(measured) > 1 else ''}{best.strategy}: {figures}"]
    if seconds < _SHORT:
        lines.append(f"- Trained for {seconds:.2g} s: too short to measure speed. Use more --rows.")
    if equal > 2 * _EQUAL_AUC:
        rows = measured[0].validation
        lines.append(f"- Of {rows:,} rows for validation, differences of AUC below {equal:.2g} are chance.")
    single = next((result for result in measured if result.strategy == "single"), None)
    if single and single is not best and best.speed < _CLOSE * single.speed:
        lines.append("- One process is nearly as fast: several pay off with more cores or hosts.")
    for result in sorted(measured, key=lambda one: -one.speed):
        if result is not best:
            lines.append(f"- {result.strategy}: {'; '.join(_reasons(result, best, samples, seconds))}.")
    return lines


def _equal(results: Sequence[Result]) -> float:
    """Return the largest AUC difference that may be chance. Fewer rows give a larger one."""
    rows = min(result.validation for result in results)
    return float(_EQUAL_AUC * max(1.0, (_EQUAL_ROWS / max(rows, 1)) ** 0.5))


def _reasons(one: Result, best: Result, samples: float, seconds: float) -> list[str]:
    """Return how a result differs from the best. Speed is busy cores divided by CPU time per sample."""
    ratio = best.speed / one.speed
    reasons = [f"{ratio:.2f} times slower" if ratio >= 1 else f"{1 / ratio:.2f} times faster"]
    if 1 / _CLOSE < ratio < _CLOSE:
        reasons = [f"about as fast ({one.speed:,.0f} samples/s)"]
    idle, work = best.cores_busy / one.cores_busy, one.work / best.work
    if ratio >= _CLOSE and idle >= _CLOSE:
        reasons.append(
            f"it leaves cores idle ({one.cores_busy:.1f} busy against {best.cores_busy:.1f}): they wait for "
            + ("operations that use one thread" if one.processes == 1 else "gradients or variables of others")
        )
    if ratio >= _CLOSE and work >= _CLOSE:
        reasons.append(
            f"it spends {work:.2f} times the CPU time on a sample: "
            + ("threads that wait actively" if one.strategy == "single"
               else "copies between devices, and threads that wait actively" if one.processes == 1
               else "messages between processes, and their copies")
        )  # fmt: skip
    lost, equal = best.auc(0, samples) - one.auc(0, samples), _equal([one])
    if lost > equal:
        why = ", because updates are computed from older values" if one.strategy == "parameter_server" else ""
        reasons.append(f"its AUC after the same rows is lower by {lost:.4f}{why}")
    late = best.auc(1, seconds) - one.auc(1, seconds)
    if late > equal:
        reasons.append(f"its AUC after {seconds:.3g} s is lower by {late:.4f}")
    if one.memory > 1.5 * best.memory:
        reasons.append(f"it needs {one.memory / best.memory:.1f} times the memory")
    return reasons
