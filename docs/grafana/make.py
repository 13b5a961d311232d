"""Write the dashboard for Grafana by its Foundation SDK: `python docs/grafana/make.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, stat, statushistory, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    FieldColor,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PATH = Path(__file__).parents[2] / "src" / "ringdance" / "core" / "monitor" / "dashboard.json"
CHOSEN = 'job=~"$job",host=~"$host"'
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
RANK = "rank {{rank}} on {{host}}"
SHARE = "percentunit"


def value(name: str) -> str:
    """Return the query of a gauge of the chosen hosts."""
    return f"ringdance_{name}{{{CHOSEN}}}"


def rate(name: str) -> str:
    """Return the query of a counter's change per second."""
    return f"rate(ringdance_{name}_total{{{CHOSEN}}}[$__rate_interval])"


def panel(kind: Any, title: str, text: str, unit: str, *queries: tuple[str, str], width: int = 12) -> Any:
    """Build a panel; a query is an expression and its legend."""
    made = kind.Panel().title(title).description(text).unit(unit).span(width).datasource(SOURCE)
    made = made.height(4 if kind is stat else 8)
    for number, (expression, legend) in enumerate(queries):
        query = Dataquery().expr(expression).legend_format(legend).ref_id(chr(65 + number)).datasource(SOURCE)
        query = query.format(PromQueryFormat.TIME_SERIES)
        made = made.with_target(query.instant() if kind is stat else query.range())
    if kind is stat:
        made = made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if kind is timeseries:
        tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
        legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
        made = made.show_points(VisibilityMode.NEVER).fill_opacity(0).min(0)
        made = made.tooltip(tooltip).legend(legend.placement(LegendPlacement.BOTTOM))
    return made


def number(title: str, text: str, unit: str, query: str, limits: tuple[float, float] | None = None) -> Any:
    """Build a panel with one number; over ``limits`` it is orange, then red."""
    made = panel(stat, title, text, unit, (query, ""), width=4)
    steps = zip(("orange", "red"), limits, strict=True) if limits else ()
    all_steps = [Threshold(None, "green"), *(Threshold(limit, colour) for colour, limit in steps)]
    return made.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(all_steps))


def numbers() -> list[Any]:
    """Build the numbers at the top."""
    straggler = panel(
        stat, "Slowest rank", "The rank that waits least, because the others wait for it.", SHARE,
        (f"bottomk(1, {rate('exposed_seconds')})", RANK), width=4,
    )  # fmt: skip
    return [
        number("Ranks", "Ranks on hosts that answer.", "none", f"count({value('job_ranks')})"),
        number("Steps per second", "Mean over the ranks.", "none", f"avg({rate('steps')})"),
        number("Exposed communication", "Share of the time in which training waits for exchanges.", SHARE,
               f"avg({rate('exposed_seconds')})", (0.15, 0.3)),
        straggler.text_mode(BigValueTextMode.NAME),
        number("Slower than the others", "Its time between exchanges, relative to the median.", SHARE,
               f"(1 - min({rate('exposed_seconds')})) / (1 - quantile(0.5, {rate('exposed_seconds')})) - 1",
               (0.1, 0.25)),
        number("Since the last step", "For the rank that is furthest behind.", "s",
               f"time() - min({value('last_step_timestamp_seconds')})", (60, 300)),
    ]  # fmt: skip


def training() -> list[Any]:
    """Build the panels about speed and waiting."""
    waits, steps = rate("exposed_seconds"), rate("steps")
    history = panel(
        statushistory, "Slow ranks", "A red row among green ones is the rank that the others wait for.",
        SHARE, (waits, RANK), width=24,
    )  # fmt: skip
    colours = FieldColor().mode(FieldColorModeId.CONTINUOUS_RD_YL_GR)
    return [
        panel(timeseries, "Steps per second", "Mean over the ranks.", "none", (f"avg({steps})", "steps/s")),
        panel(timeseries, "Time of a step", "Mean over the ranks, and the part that is waiting.", "s",
              (f"1 / avg({steps})", "step"), (f"avg({waits}) / avg({steps})", "exposed communication")),
        panel(timeseries, "Exposed communication", "The slowest rank's waiting time is communication. "
              "All other waiting is for slower ranks.", SHARE,
              (f"avg({waits})", "mean"), (f"min({waits})", "slowest"), (f"max({waits})", "fastest")),
        panel(timeseries, "Waiting by rank", "Share of each rank's time.", SHARE, (waits, RANK)),
        history.color_scheme(colours).min(0).show_value(VisibilityMode.NEVER).line_width(1).fill_opacity(70),
        panel(timeseries, "Bytes exchanged", "Mean per rank.", "Bps",
              (f"avg({rate('exchanged_bytes')})", "bytes/s")),
        panel(timeseries, "Batches and tensors", "More tensors per batch are better.", "none",
              (f"avg({rate('batches')}) / avg({steps})", "batches per step"),
              (f"avg({rate('tensors')}) / avg({rate('batches')})", "tensors per batch")),
    ]  # fmt: skip


def machines() -> list[Any]:
    """Build the panels about hosts, processes and GPUs."""
    return [
        panel(timeseries, "Cores in use by host", "", SHARE, (value("host_cpu_ratio"), "{{host}}")),
        panel(timeseries, "Memory in use by host", "", SHARE, (value("host_memory_ratio"), "{{host}}")),
        panel(timeseries, "Cores in use by rank", "Includes loaders.", "none", (rate("cpu_seconds"), RANK)),
        panel(timeseries, "Memory by rank", "Resident.", "bytes", (value("resident_memory_bytes"), RANK)),
        panel(timeseries, "GPU in use by rank", "From NVML.", SHARE, (value("gpu_utilization_ratio"), RANK)),
        panel(timeseries, "GPU memory by rank", "From NVML.", "bytes", (value("gpu_memory_bytes"), RANK)),
    ]  # fmt: skip


def variable(name: str, query: str) -> QueryVariable:
    """Build a choice of some or all values of a label."""
    made = QueryVariable(name).query(query).datasource(SOURCE).multi(True).include_all(True).all_value(".*")
    return made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.NUMERICAL_ASC)


def dashboard() -> str:
    """Return the dashboard as JSON."""
    made = (
        Dashboard("Ringdance")
        .uid("ringdance")
        .description("Speed, waiting times and machine use of training jobs.")
        .tags(["ringdance", "training"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .editable()
        .with_variable(DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
        .with_variable(variable("job", "label_values(ringdance_steps_total, job)"))
        .with_variable(variable("host", 'label_values(ringdance_steps_total{job=~"$job"}, host)'))
    )
    ids = itertools.count(1)
    for title, panels in (("Now", numbers()), ("Training", training()), ("Machines", machines())):
        made = made.with_row(Row(title).id(next(ids)))
        for one in panels:
            made = made.with_panel(one.id(next(ids)))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(dashboard())
    print(PATH)
