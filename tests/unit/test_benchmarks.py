"""The benchmarks' tables, statistics and plans. The last tests need ranks."""

from __future__ import annotations

import json
import math
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from forked import run_forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = (
    "allreduce", "resnet50_gradients", "training_step", "idle", "sparse_rows", "tensorflow_step", "jax_step",
    "timeline", "autotune",
)  # fmt: skip
LOCAL_MODULES = ("common", "peers", "shapes", "steps", *SCRIPTS)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Import a file from benchmarks/ as a script there would, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hidden = {name: sys.modules.pop(name) for name in LOCAL_MODULES if name in sys.modules}
    yield __import__
    for name in LOCAL_MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(hidden)


def test_resnet50_has_161_gradients_of_25_557_032_elements(load) -> None:
    shapes: ModuleType = load("shapes")
    backward = shapes.resnet50()
    assert len(backward) == 161
    assert shapes.elements(backward) == shapes.RESNET50_ELEMENTS == 25_557_032
    assert len({name for name, _ in backward}) == 161
    assert backward[0] == ("fc.bias", (1000,))
    assert backward[-1] == ("conv1.weight", (64, 3, 7, 7))
    assert shapes.resnet50(backward=False) == backward[::-1]
    assert max(math.prod(shape) for _, shape in backward) * 4 == 9_437_184


def test_quantiles_are_those_of_numpy(load) -> None:
    import numpy as np

    common: ModuleType = load("common")
    generator = random.Random(7)
    for count in (1, 2, 3, 10, 101):
        samples = [generator.expovariate(1) for _ in range(count)]
        summary = common.summarize(samples)
        wanted = np.percentile(samples, [50, 10, 90, 0])
        assert (summary.median, summary.p10, summary.p90, summary.least) == pytest.approx(tuple(wanted))
        assert summary.count == count
    with pytest.raises(ValueError, match="no samples"):
        common.quantile([], 0.5)


def test_samples_of_ranks_are_joined_by_repetition_or_pooled(load) -> None:
    common: ModuleType = load("common")
    ranks = [[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]
    assert common.slowest(ranks) == [3.0, 5.0, 2.5]
    assert sorted(common.pooled(ranks)) == [1.0, 2.0, 2.5, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match="zip"):
        common.slowest([[1.0], [1.0, 2.0]])


class OneRank:
    """A job with a single rank."""

    rank, size = 0, 1

    def barrier(self) -> None:
        pass

    def agreed(self, verdict: bool) -> bool:
        return verdict

    def gather(self, samples: list[float]) -> list[list[float]]:
        return [samples]


def test_contestants_take_turns_and_the_first_cycle_is_not_counted(load) -> None:
    common: ModuleType = load("common")
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    samples = common.alternate(OneRank(), {n: lambda n=n: turn(n) for n in "ABC"}, 0.0)
    cycles = common.LEAST_CYCLES
    assert order == list("ABC") * (cycles + 1)
    assert samples["B"] == [5.0 + 3 * cycle for cycle in range(cycles)]
    assert len(common.timed_block(lambda: turn("D"), 4)()) == 4
    assert order.count("D") == 5


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_cuts_cover_each_element_once_and_keep_the_limit(load, limit: int) -> None:
    peers: ModuleType = load("peers")
    sizes = [random.Random(limit).randrange(1, 90) for _ in range(20)]
    every = [(tensor, place) for tensor, size in enumerate(sizes) for place in range(size)]
    for cut in (peers.cut_stream, peers.cut_chunks):
        parts = cut(sizes, limit)
        covered = [(tensor, place) for spans in parts for tensor, a, b in spans for place in range(a, b)]
        assert sorted(covered) == every
        assert all(0 < sum(b - a for _, a, b in spans) <= limit for spans in parts)
    stream = peers.cut_stream(sizes, limit)
    assert all(sum(b - a for _, a, b in spans) == limit for spans in stream[:-1])


def test_a_launcher_is_recognised_by_its_variables(load) -> None:
    common: ModuleType = load("common")
    assert not common.under_launcher({})
    assert not common.under_launcher({"SLURM_STEP_NUM_TASKS": "1"})
    assert common.under_launcher({"SLURM_STEP_NUM_TASKS": "2"})
    assert common.under_launcher({"OMPI_COMM_WORLD_SIZE": "2"})
    assert common.under_launcher({"PMI_SIZE": "1"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_and_gives_an_example(script: str) -> None:
    path = BENCHMARKS / f"{script}.py"

    def main() -> None:
        sys.path.insert(0, str(BENCHMARKS))
        runpy.run_path(str(path), run_name="__main__")

    done = run_forked(main, [str(path), "--help"])
    assert done.returncode == 0, done.stderr
    assert f"example: python benchmarks/{script}.py" in done.stdout
    assert "Why:" in done.stdout
    assert "--module" in done.stdout


def run_limited(command: list[str], seconds: float) -> tuple[int, str]:
    """Run a command in a new session, and kill the whole session if it takes too long."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{output}") from None
    return process.returncode, output


@pytest.mark.slow
def test_the_peers_alone_run_on_two_ranks_and_write_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "allreduce.py"), "--module", "none", "--launcher", "mpiexec"]
    command += ["--sizes", "4", "262144", "--seconds", "0", "--json", str(path)]
    code, output = run_limited(command, 90)
    assert code == 0, output
    content = json.loads(path.read_text())
    assert content["about"]["ranks"] == 2
    groups = {(result["group"], result.get("contestant")) for result in content["results"]}
    assert {("4 B", "raw mpi4py"), ("256 KB", "copy bound"), ("after 50 ms of other work", "gloo")} <= groups
    assert all(result["median"] > 0 for result in content["results"] if "median" in result)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "peer"), [("tensorflow", "strategy"), ("jax", "gloo")])
def test_compiled_steps_run_on_two_ranks_beside_the_frameworks_own(
    framework: str, peer: str, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / f"{framework}_step.py"), "--small", "--seconds", "0"]
    code, output = run_limited([*command, "--json", str(path)], 240)
    assert code == 0, output
    results = json.loads(path.read_text())["results"]
    medians = {result["contestant"]: result["median"] for result in results if "contestant" in result}
    figures = {result["figure"]: result["value"] for result in results if "figure" in result}
    added = medians["step with exchange"] - medians["identity step"]
    assert figures["added, s"] == pytest.approx(added)
    assert figures["added / NumPy"] == pytest.approx(added / medians["exchange from NumPy"])
    assert figures[f"added by {peer}, s"] == pytest.approx(medians[peer] - medians["identity step"])


def test_loaders_are_compared_on_a_directory_of_photographs(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(4):
        photograph = tmp_path / "photographs" / f"class{number % 2}" / f"{number}.jpg"
        photograph.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 30), (number * 50, 0, 0)).save(photograph)
    words = ["--only", "ringdance, TFRecords", "ringdance, tars", "--workers", "1"]
    words += ["--rounds", "1", "--seconds", "0.1", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "data_loader.py", tmp_path / "photographs", *words],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ringdance, tars" in done.stdout
    speeds = json.loads((tmp_path / "result.json").read_text())["images/s, CPU ms/image"]
    assert all(speed > 0 for runs in speeds.values() for speed, _ in runs["1"])


def test_formats_of_tables_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    names = [f"{form}: ringdance" for form in ("rows", "CSV")]
    words = ["--rows", "3000", "--rounds", "1", "--seconds", "0.1", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "table_formats.py", "--only", *names, *words],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "result.json").read_text())
    assert all(speed > 0 for name in names for run in measured["rows/s, rows/CPU s"][name] for speed in run)
    assert measured["bytes"]["rows: ringdance"] == pytest.approx(4 + 39 * 8, abs=1)


@pytest.mark.slow
@pytest.mark.limit(450)
def test_parts_of_a_pipeline_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    words = ["--rows", "3000", "--rounds", "1", "--seconds", "0.1", "--json", str(tmp_path / "result.json")]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "table_pipeline.py", *words],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "+ cache before shuffle" in done.stdout
    measured = json.loads((tmp_path / "result.json").read_text())
    parts = measured["rows/s alone, with the step, share of waiting"]
    assert all(run[0] > 0 for runs in parts.values() for run in runs)
