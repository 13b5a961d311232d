"""Plots are valid files, equal for equal input, and say what is wrong with their arguments."""

import sys
from xml.etree import ElementTree

import pytest

from ringdance.errors import ArgumentError
from ringdance.tune.plots import lines

PANELS = {
    "Speed": {"ringdance": [(1, 10.0), (2, 19.0), (4, 36.0)], "bound": [(1, 10.0), (2, 20.0), (4, 40.0)]},
    "Share": {"ringdance": [(1, 0.1), (2, 0.2), (4, 0.3)], "x & y": [(1, 0.2), (4, 0.3)]},
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _plots():
    pytest.importorskip("matplotlib")


@pytest.mark.parametrize("logarithmic", [False, True])
def test_an_svg_is_valid_and_has_labels(tmp_path, logarithmic):
    noise = {"Speed": {"ringdance": [1, 1, 2]}}
    light, dark = lines(tmp_path / "plot.svg", PANELS, "ranks", ["images/s", "share"], noise, logarithmic)
    assert (light.name, dark.name) == ("plot.svg", "plot-dark.svg")
    for path in (light, dark):
        texts = [one.text for one in ElementTree.parse(path).iter(f"{SVG}text")]
        assert {"Speed", "Share", "ranks", "images/s", "share", "ringdance", "bound", "x & y"} <= {*texts}
    assert "#0d1117" in dark.read_text()
    assert "#0d1117" not in light.read_text()


def test_equal_input_gives_equal_files(tmp_path):
    first = [one.read_bytes() for one in lines(tmp_path / "a.svg", PANELS, "ranks", "y")]
    again = [one.read_bytes() for one in lines(tmp_path / "a.svg", PANELS, "ranks", "y")]
    assert first == again


def test_a_suffix_chooses_png(tmp_path):
    for path in lines(tmp_path / "plot.png", PANELS, "ranks", "y"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_nothing_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no point"):
        lines(tmp_path / "plot.svg", {"Speed": {}}, "ranks", "y")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match="matplotlib"):
        lines(tmp_path / "plot.svg", PANELS, "ranks", "y")
