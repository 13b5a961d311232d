"""Draw plots as SVG: lines, stacked bars, spans. Colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import count

_WIDTH, _LEFT, _RIGHT, _TOP = 400, 44, 12, 8
_ids = count()


def _frame(height: float, title: str, description: str, body: Iterable[str]) -> str:
    """Return a picture with its texts for screen readers."""
    number = next(_ids)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{escape(title)}</title><desc id="d{number}">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(top: float, number: int = 4) -> list[float]:
    """Return round numbers from 0 to a value that is not below ``top``."""
    step = 10 ** math.floor(math.log10(top / number)) if top > 0 else 1.0
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * step * number >= top * (1 - 1e-9))
    return [step * place for place in range(number + 1)]


def _legend(names: Mapping[int, str]) -> str:
    items = (f'<li><i class="b{n % 8}"></i>{escape(name)}</li>' for n, name in names.items())
    return f"<ul class='legend'>{''.join(items)}</ul>"


def lines(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_unit: str, y_unit: str,
    top: float = 0.0, first: int = 0,
) -> str:  # fmt: skip
    """Return a plot of lines from 0, with caption and legend.

    Args:
        title: of the plot.
        series: points by name.
        x_unit: of the x axis.
        y_unit: of the y axis.
        top: least upper end of the y axis.
        first: number of the first line's colour.
    """
    points = [point for line in series.values() for point in line]
    xs = _ticks(max(x for x, _ in points))
    ys = _ticks(max(top, *(y for _, y in points)))
    height, bottom = 200, 160

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / xs[-1] * (_WIDTH - _LEFT - _RIGHT),
            bottom - y / ys[-1] * (bottom - _TOP),
        )

    body = []
    for y in ys:
        _, at = place(0, y)
        body.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        body.append(_text(_LEFT - 6, at + 4, f"{y:g}", "end"))
    body += [_text(place(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in xs]
    body.append(_text((_LEFT + _WIDTH) / 2, height - 6, x_unit, "middle"))
    for number, line in enumerate(series.values(), first):
        marks = [place(*point) for point in sorted(line)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in marks)
        body.append(f'<path class="line c{number % 8}" d="{path}"/>')
        if len(marks) < 30:
            body += [f'<circle class="b{number % 8}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in marks]
    ends = "; ".join(f"{name}: {line[0][1]:.3g} to {line[-1][1]:.3g}" for name, line in series.items())
    legend = _legend(dict(enumerate(series, first))) if len(series) > 1 else ""
    return _figure(f"{title}, {y_unit}", _frame(height, title, f"{y_unit}; {ends}", body), legend)


def _figure(caption: str, picture: str, legend: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}{legend}</figure>"


def bars(title: str, names: Sequence[str], rows: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return stacked horizontal bars; of each row the values that ``names`` name."""
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
                f"<title>{escape(label)}, {escape(names[kind])}: {value:.3g} {escape(unit)}</title></rect>"
            )
            at += value * scale
        body.append(_text(at + 4, y + 12, f"{sum(values):.3g} {unit}"))
    said = "; ".join(
        f"{label}: {', '.join(f'{n} {v:.3g} {unit}' for n, v in zip(names, values, strict=True))}"
        for label, values in rows.items()
    )
    picture = _frame(_TOP * 2 + each * len(rows), title, said, body)
    return _figure(title, picture, _legend(dict(enumerate(names))))


def spans(
    title: str, rows: Mapping[str, Sequence[tuple[int, float, float]]], kinds: Mapping[int, str],
    marks: Mapping[str, float], end: float,
) -> str:  # fmt: skip
    """Return rows of spans on one clock.

    Args:
        title: of the plot.
        rows: kind, begin and end of each span, in ms.
        kinds: names of the kinds by their colours; 2 has a lane of its own.
        marks: times of vertical lines.
        end: of the clock, which begins at 0.
    """
    left, each = 70, 24
    scale = (_WIDTH - left - _RIGHT) / end
    bottom = 22 + each * len(rows)
    body = []
    for name, time in marks.items():
        x = left + time * scale
        body += [f'<path class="grid" d="M{x:.1f} 14V{bottom}"/>', _text(x - 2, 11, name, "end")]
    for number, (label, found) in enumerate(rows.items()):
        y, drawn = 20 + number * each, dict.fromkeys(kinds, -1.0)
        body.append(_text(left - 6, y + 13, label if len(label) < 13 else f"{label[:11]}…", "end"))
        for kind, began, ended in sorted(found):
            x, right = left + max(0.0, began) * scale, left + min(end, ended) * scale
            if right > drawn[kind] + 0.1:  # smaller ones make the page large and show nothing
                drawn[kind] = max(right, x + 0.3)
                lane = y + 9 * (kind == 2)  # what a rank does, above what is exchanged
                width = max(0.3, right - x)
                body.append(f'<rect class="b{kind}" x="{x:.1f}" y="{lane}" width="{width:.1f}" height="8"/>')
    body += [_text(_WIDTH - _RIGHT, bottom + 14, f"{end:.3g} ms", "end"), _text(left, bottom + 14, "0")]
    said = f"{len(rows)} ranks; {', '.join(marks)}; {end:.3g} ms"
    return _figure(title, _frame(bottom + 20, title, said, body), _legend(kinds))
