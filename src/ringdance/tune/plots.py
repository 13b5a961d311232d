"""Plots of measured and predicted figures, as SVG or PNG, for light and for dark pages."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from ringdance.errors import ArgumentError, optional

Line = Sequence[tuple[float, float]]
# As of observe's pages; one colour for one meaning in all plots, others get what is left in their order.
_MEANINGS = {
    "ringdance": 0, "measured": 0, "ddp": 1, "mwms": 1, "alone": 2, "predicted": 3, "bound": 6,
    "linear": 6,
}  # fmt: skip
_THEMES = {
    "": ("#0072b2 #d55e00 #009e73 #b5589a #8a6d00 #4aa3df #6a737d #7b4fc9", "#ffffff", "#24292f", "#d0d7de"),
    "-dark": (
        "#58a6ff #f0883e #3fb950 #db81c0 #d4b44a #8fd0ff #9ea7b1 #b392f0", "#0d1117", "#e6edf3", "#30363d",
    ),
}  # fmt: skip
_DASHED = 6  # colour of bounds
_APART = 1 / 12  # of the x axis, between points that are all named


def plot_file(text: str) -> Path:
    """Return a path on the command line that a plot can be written to, before anything is computed for it."""
    path = Path(text)
    if path.suffix not in (".svg", ".png"):
        raise ArgumentTypeError(f"{text}: a plot is written as .svg or .png; give a name that ends so")
    if not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text}: there is no directory {path.absolute().parent}")
    return path


def lines(
    file: str | PathLike[str],
    panels: Mapping[str, Mapping[str, Line]],
    x_label: str | Sequence[str],
    y_label: str | Sequence[str],
    noise: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    logarithmic: bool = False,
    from_zero: bool = True,
) -> list[Path]:
    """Draw lines in panels one below the other, once for light pages and once for dark ones.

    A line has the same colour in all panels; "bound" is dashed. Equal input gives equal files.

    Args:
        file: where to write the light one, by its suffix as SVG or PNG; the dark one gets "-dark" before it.
        panels: lines by name, by the panel's title; a line is its points (x, y) in order.
        x_label: what all x are, with the unit, or those of each panel.
        y_label: the same of y.
        noise: half of the interval around each point of a line, by its name, by the panel's title: drawn as a
            band.
        logarithmic: whether the x axis is.
        from_zero: whether the y axis begins at 0; else at the lowest y.

    Returns:
        The two files.

    Raises:
        ArgumentError: matplotlib is missing, or there is nothing to draw.
    """
    target = Path(file)
    if not any(line for panel in panels.values() for line in panel.values()):
        raise ArgumentError(f"{target}: there is no point to draw.")
    optional("matplotlib", ArgumentError, f"Plots need matplotlib to write {target}", "matplotlib>=3.8")
    names = [[one] * len(panels) if isinstance(one, str) else one for one in (x_label, y_label)]
    labels = list(zip(*names, strict=True))
    colours = _colours(name for panel in panels.values() for name in panel)
    written = []
    for suffix, theme in _THEMES.items():
        path = target.with_name(f"{target.stem}{suffix}{target.suffix}")
        _write(path, panels, labels, noise or {}, logarithmic, from_zero, colours, theme)
        written.append(path)
    return written


def _colours(names: Iterable[str]) -> dict[str, int]:
    """Return the number of each line's colour: by its first word's meaning, else one that is free."""
    all_names = list(dict.fromkeys(names))
    found = {name: _MEANINGS[word] for name in all_names if (word := name.split()[0]) in _MEANINGS}
    free = [n for n in range(8) if n not in {*found.values(), _DASHED}] or [0]
    others = [name for name in all_names if name not in found]
    return found | {name: free[place % len(free)] for place, name in enumerate(others)}


def _write(
    path: Path, panels: Mapping[str, Mapping[str, Line]], labels: Sequence[tuple[str, str]],
    noise: Mapping[str, Mapping[str, Sequence[float]]], logarithmic: bool, from_zero: bool,
    colours: Mapping[str, int], theme: tuple[str, str, str, str],
) -> None:  # fmt: skip
    """Draw all panels in one theme and write them."""
    import matplotlib
    from matplotlib.figure import Figure

    palette, ground, ink, grid = theme[0].split(), *theme[1:]
    style: dict[Any, Any] = {
        "svg.hashsalt": "ringdance", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif",
        "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink,
        "axes.edgecolor": grid, "grid.color": grid, "axes.facecolor": ground, "figure.facecolor": ground,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    }  # fmt: skip
    # The defaults and not the user's file: equal input gives equal plots.
    with matplotlib.rc_context(matplotlib.rcParamsDefault), matplotlib.rc_context(style):
        # One column, so that the text can be read on a phone.
        figure = Figure(figsize=(5.0, 3.2 * len(panels)), layout="constrained")
        column = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, panel), (x_label, y_label) in zip(column, panels.items(), labels, strict=True):
            axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
            axes.set(xlabel=x_label, ylabel=y_label)
            for name, line in panel.items():
                _line(axes, name, line, noise.get(title, {}).get(name), colours[name], palette)
            _scale(axes, panel, logarithmic, from_zero)
            if len(panel) > 1:
                axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
        # Without the date, equal figures give equal files.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _line(
    axes: Any, name: str, line: Line, noise: Sequence[float] | None, number: int, palette: Sequence[str]
) -> None:
    """Draw a line, with a band around it if its noise is known."""
    xs, ys = [x for x, _ in line], [y for _, y in line]
    bound, colour = number == _DASHED, palette[number]
    style, width, marker = ("--", 1.5, "") if bound else ("-", 2.0, "o")
    axes.plot(xs, ys, label=name, color=colour, linewidth=width, linestyle=style, marker=marker, markersize=4)
    if noise:
        low, high = ([y + sign * half for y, half in zip(ys, noise, strict=True)] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _scale(axes: Any, panel: Mapping[str, Line], logarithmic: bool, from_zero: bool) -> None:
    """Set the axes' scales and name the points on the x axis, if they are far enough apart."""
    from matplotlib.ticker import FuncFormatter

    xs = sorted({x for line in panel.values() for x, _ in line})
    if logarithmic:
        axes.set_xscale("log", base=2)
    if from_zero:
        axes.set_ylim(bottom=0)
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_major_formatter(plain)
    axes.xaxis.set_major_formatter(plain)
    places = [math.log(x) if logarithmic else x for x in xs]
    if all(right - left > _APART * (places[-1] - places[0]) for left, right in pairwise(places)):
        axes.set_xticks(xs)
    axes.minorticks_off()
