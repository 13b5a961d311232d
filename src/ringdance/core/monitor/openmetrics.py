"""Serve the figures of a host's ranks as OpenMetrics, by prometheus-client."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SILENT_S = 10.0  # that a client may be, in its request or while it reads the answer
_THREADS = 64


class Figure(NamedTuple):
    """One figure of a row as a metric with the labels rank and host.

    Attributes:
        key: in the row.
        name: of the metric, which ends with its unit; counters get ``_total`` in addition.
        unit: as in the name; "" for numbers of things.
        text: its help.
        factor: from the row's unit to the metric's.
    """

    key: str
    name: str
    unit: str
    text: str
    factor: float = 1


COUNTERS = (
    Figure("steps", "ringdance_steps", "", "Steps of the optimizer."),
    Figure("batches", "ringdance_batches", "", "Batches of tensors exchanged."),
    Figure("tensors", "ringdance_tensors", "", "Tensors exchanged."),
    Figure("bytes", "ringdance_exchanged_bytes", "bytes", "Bytes of tensors exchanged."),
    Figure(
        "exposed_seconds", "ringdance_exposed_seconds", "seconds",
        "Time that training waited for results of exchanges; the slowest rank waits least.",
    ),
    Figure("cpu_seconds", "ringdance_cpu_seconds", "seconds", "CPU time of the rank with its children."),
)  # fmt: skip
GAUGES = (
    Figure("rss_bytes", "ringdance_resident_memory_bytes", "bytes", "Resident memory of the rank."),
    Figure("size", "ringdance_job_ranks", "", "Number of ranks of the job."),
    Figure(
        "last_step_time", "ringdance_last_step_timestamp_seconds", "seconds",
        "When the last step ended, since the epoch; absent before the first.",
    ),
    Figure("gpu_percent", "ringdance_gpu_utilization_ratio", "ratio", "Use of the rank's GPU.", 0.01),
    Figure("gpu_memory_bytes", "ringdance_gpu_memory_bytes", "bytes", "Memory used on the rank's GPU."),
)  # fmt: skip
HOST = (
    Figure("host_cpu_percent", "ringdance_host_cpu_ratio", "ratio", "Use of the job's own cores.", 0.01),
    Figure("host_memory_percent", "ringdance_host_memory_ratio", "ratio", "Use of the host's memory.", 0.01),
)


class RankCollector(Collector):
    """Turns rows into metrics at each scrape.

    Args:
        rows: returns the current ones, see ``sampler.Sampler.rows``.
    """

    def __init__(self, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._rows = rows

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not ask for rows when it is made."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all ranks of this host."""
        rows = self._rows()
        for family, figures, labels in (
            (CounterMetricFamily, COUNTERS, ("rank", "host")),
            (GaugeMetricFamily, GAUGES, ("rank", "host")),
            (GaugeMetricFamily, HOST, ("host",)),
        ):
            for key, name, unit, text, factor in figures:
                metric = family(name, text, labels=labels, unit=unit)
                found = {tuple(str(row[label]) for label in labels): row[key] for row in rows if key in row}
                for values, value in found.items():
                    metric.add_metric(values, round(value * factor, 6))
                if found:
                    yield metric


def serve(text: str, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> str:
    """Serve rows at ``[ADDRESS:]PORT``, on the loopback interface by default; return the URL.

    Raises:
        OSError: the port is taken, or the address is not this host's.
    """
    address, _, port = text.rpartition(":")
    address = address.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:  # newer Pythons' servers share a port with one another
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, int(port)))
            probe.listen()
        registry = CollectorRegistry()
        registry.register(RankCollector(rows))
        server, _ = start_http_server(int(port), address, registry)
        # Each client has a thread: none for ever, and not any number of them.
        handler: Any = server.RequestHandlerClass
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _SILENT_S})
        server.verify_request = lambda *_: threading.active_count() < _THREADS  # type: ignore[method-assign]
    except OSError as error:
        taken = " (by another job?). Set RINGDANCE_METRICS_PORT to another; 0 takes any that is free"
        advice = taken if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"port {text}: {error.strerror}{advice}") from None
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{server.server_port}/metrics"
