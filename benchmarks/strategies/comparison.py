"""What compare.py measured, as a table, as curves, and as advice that follows from the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringdance.tools.report import svg

_EQUAL_AUC = 0.002  # closer ones count as equal, on so many rows of the validation part
_EQUAL_ROWS = 30_000
_SHORT = 5.0  # seconds of training below which speeds say little
_DISTURBED = 0.2  # share of the cores that other programs use, from which on they decide
_CLOSE = 1.1  # speeds within this factor are not worth a change
_NAMES = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


@dataclass
class Result:
    """What a strategy reached.

    Attributes:
        framework, strategy: which.
        settings: that all must share.
        error: why there are no figures, or "".
        processes: of all hosts.
        threads: that a trial has chosen.
        warm: rows before the clock was started.
        validation: rows that the AUC is of.
        cores_busy: of all processes, on average while training.
        others: cores that other programs used meanwhile, where all processes were on one host.
        memory: bytes, the sum of the processes' peaks, without pages of mapped files.
        startup: seconds from the command until the clock was started.
        curve: rows, seconds of training, AUC and log-loss on the validation part.
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
        """Framework and strategy."""
        return f"{_NAMES[self.framework]} {self.strategy}"

    @property
    def speed(self) -> float:
        """Samples per second."""
        samples, seconds = self.curve[-1][:2]
        return (samples - self.warm) / seconds

    @property
    def work(self) -> float:
        """Seconds of processor time for 1,000 samples."""
        return 1000 * self.cores_busy / self.speed

    def auc(self, axis: int, value: float) -> float:
        """Return the AUC of the evaluation nearest to so many samples (axis 0) or seconds (axis 1).

        Nothing is interpolated: between two evaluations the AUC may have been anything.
        """
        return min(self.curve, key=lambda point: abs(point[axis] - value))[2] if value else 0.5


def common(results: Iterable[Result]) -> tuple[float, float]:
    """Return the most samples after which all were evaluated, and the seconds that all have trained for."""
    curves = [one.curve for one in results if not one.error]
    same = set.intersection(*({point[0] for point in curve} for curve in curves))
    return max(same, default=0.0), min(curve[-1][1] for curve in curves)


def table(results: Sequence[Result]) -> str:
    """Return a table in Markdown, by framework, the fastest first."""
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
    """Draw AUC against rows and against time, for each framework; nothing is written without figures."""
    panels, x_labels = {}, []
    axes = ((0, 1000, "rows", "thousand rows"), (1, 1, "time", "seconds of training"))
    for framework, title in _NAMES.items():
        chosen = [one for one in results if one.framework == framework and not one.error]
        for axis, scale, word, label in axes if chosen else ():
            x_labels.append(label)
            panels[f"{title}, by {word}"] = {
                one.strategy: [(point[axis] / scale, point[2]) for point in one.curve] for one in chosen
            }
    y_labels = ["AUC on the validation part"] * len(panels)
    if panels:
        svg.write(file, panels, x_labels, y_labels, from_zero=False)


def advice(results: Sequence[Result]) -> str:
    """Return sentences: which strategy to use here, and why the others are slower or less accurate."""
    lines = []
    for framework, title in _NAMES.items():
        chosen = [one for one in results if one.framework == framework]
        measured = [one for one in chosen if not one.error]
        if measured:
            lines += [*_of_framework(title, measured), ""]
        lines += [f"{one.name} failed: {one.error}" for one in chosen if one.error]
    return "\n".join(lines).strip() + "\n"


def _of_framework(title: str, measured: Sequence[Result]) -> list[str]:
    samples, seconds = common(measured)
    highest, equal = max(one.auc(0, samples) for one in measured), _equal(measured)
    good = [one for one in measured if one.auc(0, samples) >= highest - equal]
    best = max(good, key=lambda one: one.speed)
    cores, others = best.settings.get("cores", 0), max(one.others for one in measured)
    figures = (
        f"{best.speed:,.0f} samples/s with {best.cores_busy:.1f} of {cores} cores busy, AUC "
        f"{best.auc(0, samples):.4f} after {samples:,} rows."
    )
    if others > _DISTURBED * cores:
        return [
            f"{title}: other programs used up to {others:.1f} of {cores} cores meanwhile, so the figures do "
            "not say which strategy is the best. Run it again (--again) while nothing else runs."
        ]
    lines = [f"{title}: {'use ' if len(measured) > 1 else ''}{best.strategy}: {figures}"]
    if seconds < _SHORT:
        lines.append(f"- Trained for {seconds:.2g} s: too short for figures of speed. Give more --rows.")
    if equal > 2 * _EQUAL_AUC:
        rows = measured[0].validation
        lines.append(f"- Of {rows:,} rows for validation, differences of AUC below {equal:.2g} are chance.")
    single = next((one for one in measured if one.strategy == "single"), None)
    if single and single is not best and best.speed < _CLOSE * single.speed:
        lines.append("- One process is nearly as fast: several are worth it on more cores or hosts.")
    for one in sorted(measured, key=lambda one: -one.speed):
        if one is not best:
            lines.append(f"- {one.strategy}: {'; '.join(_reasons(one, best, samples, seconds))}.")
    return lines


def _equal(results: Sequence[Result]) -> float:
    """Return the difference of AUC that counts as none: the fewer rows, the more is chance."""
    rows = min(one.validation for one in results)
    return float(_EQUAL_AUC * max(1.0, (_EQUAL_ROWS / max(rows, 1)) ** 0.5))


def _reasons(one: Result, best: Result, samples: float, seconds: float) -> list[str]:
    """Return what distinguishes a result from the best: speed is cores busy / CPU time per sample."""
    ratio = best.speed / one.speed
    found = [f"{ratio:.2f} times slower" if ratio >= 1 else f"{1 / ratio:.2f} times faster"]
    if 1 / _CLOSE < ratio < _CLOSE:
        found = [f"about as fast ({one.speed:,.0f} samples/s)"]
    idle, work = best.cores_busy / one.cores_busy, one.work / best.work
    if ratio >= _CLOSE and idle >= _CLOSE:
        found.append(
            f"it leaves cores idle ({one.cores_busy:.1f} busy against {best.cores_busy:.1f}): they wait for "
            + ("operations that use one thread" if one.processes == 1 else "gradients or variables of others")
        )
    if ratio >= _CLOSE and work >= _CLOSE:
        found.append(
            f"it spends {work:.2f} times the CPU time on a sample: "
            + ("threads that wait actively" if one.strategy == "single"
               else "copies between devices, and threads that wait actively" if one.processes == 1
               else "messages between processes, and their copies")
        )  # fmt: skip
    lost, equal = best.auc(0, samples) - one.auc(0, samples), _equal([one])
    if lost > equal:
        why = ", because updates are computed from older values" if one.strategy == "parameter_server" else ""
        found.append(f"its AUC after the same rows is lower by {lost:.4f}{why}")
    late = best.auc(1, seconds) - one.auc(1, seconds)
    if late > equal:
        found.append(f"its AUC after {seconds:.3g} s is lower by {late:.4f}")
    if one.memory > 1.5 * best.memory:
        found.append(f"it needs {one.memory / best.memory:.1f} times the memory")
    return found
