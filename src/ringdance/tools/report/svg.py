"""Draw line plots and stacked bars as SVG. Colors are CSS classes in ``page.css``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import count, cycle
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")
_WIDTH, _LEFT, _RIGHT, _TOP = 400, 44, 12, 8
_HEIGHT, _BOTTOM = 200, 160  # height of a line plot, and y coordinate of the x axis
_FREE = 4  # index of the first color that does not represent a part of a step
_BOUNDS, _BOUND = ("bound", "linear"), 6  # names and color of the dashed lines for ideal values
_APART = 32  # minimum distance between labels on the x axis
_ids = count()

Line = Sequence[tuple[float, float]]


def _frame(height: float, title: str, description: str, body: Iterable[str]) -> str:
    """Return an SVG image with a title and description for screen readers."""
    number = next(_ids)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(title)}</title><desc id="d{number}">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float, number: int = 4) -> list[float]:
    """Return evenly spaced round numbers that cover the range from ``low`` to ``high``."""
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / number))
    for factor in (1, 2, 2.5, 5, 10, 20):
        first = math.floor(low / (factor * step))
        if (first + number) * factor * step >= high - 1e-9 * span:
            break
    return [(first + place) * factor * step for place in range(number + 1)]


def _legend(names: Mapping[int, str]) -> str:
    items = (f'<li><i class="b{n % 8}"></i>{escape(name)}</li>' for n, name in names.items())
    return f"<ul class='legend'>{''.join(items)}</ul>"


def lines(title: str, series: Mapping[str, Line], x_unit: str, y_unit: str, top: float = 0.0) -> str:
    """Return a line plot with a caption and legend. Its y axis starts at 0.

    Args:
        title: Title of the plot.
        series: Points of each line, by name.
        x_unit: Unit of the x axis.
        y_unit: Unit of the y axis.
        top: The y axis extends at least to this value.
    """
    colours = {name: number % 8 for number, name in enumerate(series, _FREE)}
    highest = max(top, *(y for line in series.values() for _, y in line))
    body = _drawn(series, colours, x_unit, _ticks(0.0, highest))
    ends = "; ".join(f"{name}: {line[0][1]:.3g} to {line[-1][1]:.3g}" for name, line in series.items())
    legend = _legend(dict(enumerate(series, _FREE))) if len(series) > 1 else ""
    return _figure(f"{title}, {y_unit}", _frame(_HEIGHT, title, f"{y_unit}; {ends}", body), legend)


def _drawn(
    series: Mapping[str, Line], colours: Mapping[str, int], x_unit: str, ys: Sequence[float],
    logarithmic: bool = False, noise: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:  # fmt: skip
    """Return the SVG elements for the axes and lines of a plot. For the arguments, see ``write``."""
    known = sorted({x for line in series.values() for x, _ in line})
    ticks = known if logarithmic else _ticks(0.0, known[-1])

    def across(x: float) -> float:
        share = x / ticks[-1]
        if logarithmic:
            share = math.log(x / known[0]) / (math.log(known[-1] / known[0]) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return _BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (_BOTTOM - _TOP)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)

    body, last = [], -math.inf
    for y in ys:
        body.append(f'<path class="grid" d="M{_LEFT} {up(y):.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(_text(_LEFT - 6, up(y) + 4, f"{y:g}", "end"))
    for x in ticks:
        if across(x) - last >= _APART:
            last = across(x)
            body.append(_text(last, _BOTTOM + 16, f"{x:g}", "middle"))
    body.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_unit, "middle"))
    for name, line in series.items():
        number, points = colours[name], sorted(line)
        if shares := (noise or {}).get(name):
            low, high = (
                [(x, y * (1 + sign * share)) for (x, y), share in zip(points, shares, strict=True)]
                for sign in (-1, 1)
            )
            body.append(f'<path class="b{number}" opacity="0.2" d="{path([*low, *high[::-1]])}Z"/>')
        body.append(f'<path class="line c{number}" d="{path(points)}"/>')
        for x, y in points if len(points) < 30 else ():
            body.append(f'<circle class="b{number}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5"/>')
    return body


def write(
    file: Path, panels: Mapping[str, Mapping[str, Line]], x_labels: Sequence[str], y_labels: Sequence[str], *,
    noise: Mapping[str, Sequence[float]] | None = None, logarithmic: bool = False, from_zero: bool = True,
) -> None:  # fmt: skip
    """Write vertically stacked line plots to an SVG file that is legible on both light and dark pages.

    Each line has the same color in all plots. "bound" and "linear" are dashed. The output is deterministic.

    Args:
        file: Path that ends in ``.svg``.
        panels: Lines by name for each plot, by the title of the plot.
        x_labels: Each plot's x-axis label, including the unit.
        y_labels: Each plot's y-axis label, including the unit.
        noise: Half-width of each point's confidence interval, as a fraction of y, by line name.
        logarithmic: If True, the x axes are logarithmic.
        from_zero: If True, the y axes start at 0. Otherwise they start near the smallest value.
    """
    free = cycle(number for number in range(8) if number != _BOUND)
    colours: dict[str, int] = {}
    for name in (name for series in panels.values() for name in series):
        if name not in colours:
            colours[name] = _BOUND if name.startswith(_BOUNDS) else next(free)
    body, at = [], 20
    for (title, series), x_label, y_label in zip(panels.items(), x_labels, y_labels, strict=True):
        values = [y for line in series.values() for _, y in line]
        ys = _ticks(0.0 if from_zero else min(values), max(values))
        parts = [_text(_LEFT, -6, f"{title}, {y_label}")]
        parts += _drawn(series, colours, x_label, ys, logarithmic, noise)
        rows = 0
        for place, name in enumerate(series if len(series) > 1 else ()):
            x, rows = _LEFT + place % 2 * _WIDTH / 2, place // 2 + 1
            y = _HEIGHT - 6 + 16 * rows
            parts += [f'<rect class="b{colours[name]}" x="{x}" y="{y - 9}" width="9" height="9"/>']
            parts.append(_text(x + 14, y, name))
        body.append(f'<g transform="translate(0 {at})">{"".join(parts)}</g>')
        at += _HEIGHT + 16 * rows + 30
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {at - 20}" role="img" '
        f'aria-label="{escape(", ".join(panels))}"><style>{STYLE.read_text()}</style>'
        f'<rect class="back" width="100%" height="100%"/>{"".join(body)}</svg>\n',
        encoding="utf-8",
    )


def _figure(caption: str, picture: str, legend: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}{legend}</figure>"


def bars(title: str, names: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Return a plot with one stacked bar of milliseconds per row. ``names`` labels the values in a row."""
    left, each = 70, 22
    longest = max(sum(values) for values in rows.values()) or 1.0
    scale = (_WIDTH - left - 70) / longest
    body = []
    for number, (label, values) in enumerate(rows.items()):
        at, y = float(left), _TOP + number * each
        body.append(_text(left - 6, y + 12, label if len(label) < 13 else f"{label[:11]}…", "end"))
        for kind, value in enumerate(values):
            body.append(
                f'<rect class="b{kind}" x="{at:.1f}" y="{y}" width="{value * scale:.1f}" height="15">'
                f"<title>{escape(label)}, {escape(names[kind])}: {value:.3g} ms</title></rect>"
            )
            at += value * scale
        body.append(_text(at + 4, y + 12, f"{sum(values):.3g} ms"))
    description = "; ".join(
        f"{label}: {', '.join(f'{n} {v:.3g} ms' for n, v in zip(names, values, strict=True))}"
        for label, values in rows.items()
    )
    picture = _frame(_TOP * 2 + each * len(rows), title, description, body)
    return _figure(title, picture, _legend(dict(enumerate(names))))
