"""The dashboard for Grafana equals what its script writes, and queries metrics that the endpoint has."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ringdance.core.monitor.openmetrics import COUNTERS, GAUGES, HOST, RankCollector

ROOT = Path(__file__).parents[4]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def test_the_dashboard_is_that_of_its_script() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "grafana" / "make.py"))["dashboard"]()
    line = [sys.executable, "-m", "ringdance.core.monitor.dashboard"]
    shown = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown == written, "run docs/grafana/make.py"


def test_grafana_s_own_types_read_the_dashboard_back() -> None:
    register_default_plugins()
    text = (ROOT / "src/ringdance/core/monitor/dashboard.json").read_text()
    read = Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == json.loads(text)


def test_every_query_is_of_metrics_that_the_endpoint_has() -> None:
    row = {"rank": 0, "host": "h", **{figure.key: 1 for figure in (*COUNTERS, *GAUGES, *HOST)}}
    registry = CollectorRegistry()
    registry.register(RankCollector(lambda: [row]))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    names = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((ROOT / "src/ringdance/core/monitor/dashboard.json").read_text())
    queries = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets") or ()]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"ringdance_\w+", query)}
    assert len(queries) > 20
    assert used <= names
    assert names == used, "some metrics are not in any panel"
    ids = [panel["id"] for panel in panels(dashboard) if "id" in panel]
    assert len(ids) == len(set(ids))
