"""Plots in files are valid SVG, identical for the same input, and contain all names."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ringdance.tools.report import svg

PANELS: Any = {
    "Speed": {"ringdance": [(1, 10.0), (2, 19.0), (4, 36.0)], "bound": [(1, 10.0), (2, 20.0), (4, 40.0)]},
    "Share": {"ringdance": [(1, 0.1), (2, 0.2), (4, 0.3)], "x & y": [(1, 0.2), (4, 0.3)]},
}


def written(path: Path, **options: Any) -> str:
    svg.write(path, PANELS, ["ranks"] * 2, ["images/s", "share"], **options)
    return path.read_text()


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_file_is_valid_and_has_labels(tmp_path: Path, logarithmic: bool) -> None:
    options: Any = {"noise": {"ringdance": [0.1, 0.1, 0.2]}, "logarithmic": logarithmic}
    text = written(tmp_path / "plot.svg", **options)
    root = ElementTree.fromstring(text)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Speed, images/s", "Share, share", "ranks", "ringdance", "bound", "x & y", "40"} <= {*texts}
    assert "prefers-color-scheme: dark" in text
    assert text.count('class="line c0"') == 2, "a line must have the same color in all plots"
    assert text.count('class="line c6"') == 1
    assert text.count('opacity="0.2"') == 2
    assert written(tmp_path / "again.svg", **options) == text


def test_axes_may_begin_above_0(tmp_path: Path) -> None:
    assert ">0.1</text>" in written(tmp_path / "plot.svg", from_zero=False)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 40, [0, 10, 20, 30, 40]),
        (0, 0, [0, 0.1, 0.2, 0.3, 0.4]),
        (0.71, 0.74, [0.71, 0.72, 0.73, 0.74, 0.75]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert svg._ticks(low, high) == pytest.approx(ticks)
