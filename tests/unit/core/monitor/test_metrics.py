"""Metrics of ranks: samples, JSON lines and OpenMetrics."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringdance.core.monitor import openmetrics
from ringdance.core.monitor.metrics import Metrics
from ringdance.core.monitor.sampler import Sampler
from ringdance.core.ring import Ring, RingReader, Word
from ringdance.launch import cli

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(autouse=True)
def servers_that_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the servers. A thread that polls would make every deadlock in a later test uncertain."""
    start, servers = openmetrics.start_http_server, []

    def started(*arguments: Any) -> Any:
        servers.append(start(*arguments))
        return servers[-1]

    monkeypatch.setattr(openmetrics, "start_http_server", started)
    yield
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def rings(count: int) -> list[Ring]:
    made = [Ring() for _ in range(count)]
    for rank, ring in enumerate(made, 4):
        ring.describe(rank, 8, "node1")
        ring.words[Word.PID] = os.getpid() if rank == 4 else os.getppid()
    return made


def warn(text: str) -> None:
    print(f"ringdance: node1: {text}", file=sys.stderr)


def metrics_of(rings: list[Ring], **options: Any) -> Metrics:
    readers = [RingReader(ring.memory) for ring in rings]
    usual = {"path": [], "interval": 0.01, "directory": "", "anew": True, "address": ""}
    return Metrics(readers, **{**usual, "rank": 4, "warn": warn, **options})


def count(ring: Ring, steps: int) -> None:
    words = ring.words
    words[Word.STEPS] += steps
    words[Word.LAST_STEP] = time.monotonic_ns()
    words[Word.BATCHES] += 2 * steps
    words[Word.TENSORS] += 10 * steps
    words[Word.BYTES] += 4000 * steps
    words[Word.WAITED] += 1_500_000 * steps


def exposition(address: str, **headers: str) -> tuple[str, str]:
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_lines_have_the_counters_and_the_last_of_each_rank(tmp_path: Path) -> None:
    first, second = rings(2)
    metrics = metrics_of([first, second], directory=str(tmp_path / "new"), interval=0.5)
    count(first, 3)
    time.sleep(0.6)
    metrics.write_if_due()
    metrics.write_if_due()  # too early
    count(first, 4)
    metrics.leave([os.getppid()])
    count(first, 1)
    metrics.leave([os.getpid()])
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "new" / "metrics-4.jsonl").read_text().splitlines()]
    assert [(row["rank"], row["steps"]) for row in rows] == [(4, 3), (5, 0), (4, 7), (5, 0), (4, 8)]
    last = rows[-1]
    exact = {
        "rank": 4, "host": "node1", "pid": os.getpid(), "size": 8, "steps": 8, "batches": 16, "tensors": 80,
        "bytes": 32000, "exposed_seconds": 0.012,
    }  # fmt: skip
    assert last.items() >= exact.items()
    assert abs(last["time"] - time.time()) < 60
    assert abs(last["last_step_time"] - time.time()) < 60
    assert last["cpu_seconds"] > 0
    assert last["rss_bytes"] > 1 << 20
    assert 0 <= last["host_cpu_percent"] <= 100
    assert 0 < last["host_memory_percent"] < 100
    metrics_of([first], directory=str(tmp_path / "new"), anew=False).leave([os.getpid()])
    assert len((tmp_path / "new" / "metrics-4.jsonl").read_text().splitlines()) == 6


def test_the_time_of_children_counts(tmp_path: Path) -> None:
    (ring,) = rings(1)
    sampler = Sampler([RingReader(ring.memory)])
    before = sampler.rows()[0]["cpu_seconds"]
    text = "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
    until = time.monotonic() + 30
    while sampler.rows()[0]["cpu_seconds"] < before + 0.3 and time.monotonic() < until:
        time.sleep(0.05)
    assert sampler.rows()[0]["cpu_seconds"] >= before + 0.3
    child.communicate(b"\n")


def test_the_endpoint_speaks_openmetrics() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    made = rings(2)
    address = f"127.0.0.1:{free_port()}"
    metrics_of(made, address=address)
    count(made[0], 2)
    kind, text = exposition(address, Accept=OPENMETRICS)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exposed = families["ringdance_exposed_seconds"]
    assert (exposed.type, exposed.unit) == ("counter", "seconds")
    assert [(s.name, s.labels, s.value) for s in exposed.samples] == [
        ("ringdance_exposed_seconds_total", {"rank": "4", "host": "node1"}, 0.003),
        ("ringdance_exposed_seconds_total", {"rank": "5", "host": "node1"}, 0),
    ]
    (cpu,) = families["ringdance_host_cpu_ratio"].samples
    assert cpu.labels == {"host": "node1"}
    assert 0 <= cpu.value <= 1
    (last_step,) = families["ringdance_last_step_timestamp_seconds"].samples
    assert last_step.labels["rank"] == "4"
    kind, text = exposition(address)
    assert kind.startswith("text/plain")
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "metrics"], input=text, text=True, check=True)


def test_silent_clients_keep_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringdance.core.monitor import openmetrics

    before = threading.active_count()
    monkeypatch.setattr(openmetrics, "_SILENT_S", 0.5)
    monkeypatch.setattr(openmetrics, "_THREADS", before + 10)
    address = f"127.0.0.1:{free_port()}"
    metrics_of(rings(1), address=address)
    clients = []
    for _ in range(30):
        clients.append(socket.create_connection(address.split(":")))
        time.sleep(0.01)  # the queue of connections to accept is short
    most, until = 0, time.monotonic() + 30
    while (count := threading.active_count()) > before + 1 or not most:
        most = max(most, count)
        assert time.monotonic() < until
        time.sleep(0.01)
    assert most <= before + 10
    assert "ringdance_steps_total" in exposition(address)[1]
    for client in clients:
        client.close()


def test_a_port_that_is_taken_is_said(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        metrics_of(rings(1), address=str(port), directory=str(tmp_path)).leave([os.getpid()])
    assert capfd.readouterr().err == (
        f"ringdance: node1: metrics are not served: port {port}: Address already in use. "
        "Set RINGDANCE_METRICS_PORT to another port, or to 0 to use any free port.\n"
    )
    assert (tmp_path / "metrics-4.jsonl").exists()
    metrics_of(rings(1), address="0", directory=str(tmp_path / "metrics-4.jsonl"))
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"ringdance: node1: metrics are not written: {tmp_path}/metrics-4.jsonl: File exists"
    assert "ringdance_steps_total" in exposition(second.partition("http://")[2].removesuffix("/metrics"))[1]


def test_a_package_that_is_missing_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "prometheus_client"
    monkeypatch.delitem(sys.modules, "ringdance.core.monitor.openmetrics", raising=False)
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    metrics = metrics_of(rings(1), address="0", directory=str(tmp_path))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "are at" not in line]
    assert line.endswith(f"the package {missing} is missing: {sys.executable} -m pip install {missing}")
    metrics.leave([os.getpid()])
    assert (tmp_path / "metrics-4.jsonl").read_text()


def test_figures_of_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake NVML has two devices and the real function names. A rank runs on the second device."""
    nvml: Any = types.ModuleType("pynvml")
    used = {0: [], 1: [types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30)]}
    nvml.NVMLError = RuntimeError
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetComputeRunningProcesses = used.__getitem__
    nvml.nvmlDeviceGetUtilizationRates = lambda device: types.SimpleNamespace(gpu=[10, 80][device])
    nvml.nvmlDeviceGetMemoryInfo = lambda device: types.SimpleNamespace(used=[1 << 30, 4 << 30][device])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first_ring, second_ring = rings(2)
    first, second = Sampler([RingReader(ring.memory) for ring in (first_ring, second_ring)]).rows()
    assert (first["gpu_percent"], first["gpu_memory_bytes"]) == (80, 3 << 30)
    # NVML does not report this process, so the device of its local rank, 1, counts.
    assert (second["gpu_percent"], second["gpu_memory_bytes"]) == (80, 4 << 30)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "gpu_percent" not in Sampler([RingReader(first_ring.memory)]).rows()[0]


def test_what_is_wrong_in_options_is_said_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-np", "2", "--autotune", "--autotune-log-file", "a.json", "true"]) == 2
    assert "Pass tune.csv to have the result written to tune.json" in capsys.readouterr().err
