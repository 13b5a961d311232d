"""Serve the metrics of a host's ranks as OpenMetrics, with prometheus-client."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SILENT_S = 10.0  # timeout for a client to send its request or read the response
_THREADS = 64


class Figure(NamedTuple):
    """A value in a row that is exported as a metric with the labels rank and host.

    Attributes:
        key: Key in the row.
        name: Name of the metric, which ends with the unit. Counters also get ``_total``.
        unit: Unit in the name; "" for counts.
        text: Help text of the metric.
        factor: Factor that converts the row's unit to the metric's unit.
    """

    key: str
    name: str
    unit: str
    text: str
    factor: float = 1


COUNTERS = (
    Figure("steps", "ringdance_steps", "", "Optimizer steps."),
    Figure("batches", "ringdance_batches", "", "Batches of tensors exchanged."),
    Figure("tensors", "ringdance_tensors", "", "Tensors exchanged."),
    Figure("bytes", "ringdance_exchanged_bytes", "bytes", "Bytes of tensors exchanged."),
    Figure(
        "exposed_seconds", "ringdance_exposed_seconds", "seconds",
        "Time that training waited for results of exchanges; the slowest rank waits least.",
    ),
    Figure("cpu_seconds", "ringdance_cpu_seconds", "seconds", "CPU time of the rank and its children."),
)  # fmt: skip
GAUGES = (
    Figure("rss_bytes", "ringdance_resident_memory_bytes", "bytes", "Resident memory of the rank."),
    Figure("size", "ringdance_job_ranks", "", "Number of ranks in the job."),
    Figure(
        "last_step_time", "ringdance_last_step_timestamp_seconds", "seconds",
        "When the last step ended, since the epoch; absent before the first step.",
    ),
    Figure("gpu_percent", "ringdance_gpu_utilization_ratio", "ratio", "Utilization of the rank's GPU.", 0.01),
    Figure("gpu_memory_bytes", "ringdance_gpu_memory_bytes", "bytes", "Memory used on the rank's GPU."),
)  # fmt: skip
HOST = (
    Figure("host_cpu_percent", "ringdance_host_cpu_ratio", "ratio", "Use of the job's cores.", 0.01),
    Figure("host_memory_percent", "ringdance_host_memory_ratio", "ratio", "Use of the host's memory.", 0.01),
)


class RankCollector(Collector):
    """Turns rows into metrics at each scrape.

    Args:
        rows: Returns the current rows, as ``sampler.Sampler.rows`` does.
    """

    def __init__(self, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._rows = rows

    def describe(self) -> list[Metric]:
        """Return nothing, so that the registry does not request rows when this collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all ranks on this host."""
        rows = self._rows()
        for family, figures, labels in (
            (CounterMetricFamily, COUNTERS, ("rank", "host")),
            (GaugeMetricFamily, GAUGES, ("rank", "host")),
            (GaugeMetricFamily, HOST, ("host",)),
        ):
            for key, name, unit, text, factor in figures:
                metric = family(name, text, labels=labels, unit=unit)
                samples = {tuple(str(row[label]) for label in labels): row[key] for row in rows if key in row}
                for values, value in samples.items():
                    metric.add_metric(values, round(value * factor, 6))
                if samples:
                    yield metric


def serve(text: str, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> str:
    """Serve rows at ``[ADDRESS:]PORT``, by default on the loopback interface. Returns the URL.

    Raises:
        OSError: The port is in use, or the address does not belong to this host.
    """
    address, _, port = text.rpartition(":")
    address = address.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:  # fails if the port is in use; newer servers would share it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, int(port)))
            probe.listen()
        registry = CollectorRegistry()
        registry.register(RankCollector(rows))
        server, _ = start_http_server(int(port), address, registry)
        # Each client gets its own thread. Limit the number and the lifetime of these threads.
        handler: Any = server.RequestHandlerClass
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _SILENT_S})
        server.verify_request = lambda *_: threading.active_count() < _THREADS  # type: ignore[method-assign]
    except OSError as error:
        taken = ". Set RINGDANCE_METRICS_PORT to another port, or to 0 to use any free port."
        advice = taken if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"port {text}: {error.strerror}{advice}") from None
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{server.server_port}/metrics"
