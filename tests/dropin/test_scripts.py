"""Scripts as users write them for Horovod, run alone, by horovodrun and by mpiexec.

By horovodrun, the scripts run in conftest.py's job. In make test-all, each script also runs as its own job.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from script_jobs import LIMIT, SCRIPTS, Outcome, Task, every_way, run_all, run_each

pytestmark = pytest.mark.limit(10 * LIMIT)
@dataclass(frozen=True)
class Run:
    """A script with its arguments, and the earlier run in whose directory it continues."""

    script: str
    words: tuple[str, ...] = ()
    after: str = ""


def plan(size: int) -> dict[str, Run]:
    """Return what to run on `size` ranks, by name, in this order."""
    compressed = ("--fp16-allreduce",) if size == 3 else ()
    image_words = ("--batch-size", "40", "--batches-per-allreduce", "1")
    loader = ("--workers", "1")
    runs = {
        "mnist": Run("mnist", ("--batch-size", str(48 // size), "--lr", str(0.06 / size))),
        "synthetic_benchmark": Run("synthetic_benchmark", (
            "--num-iters", "3", "--num-batches-per-iter", "3", "--num-warmup-batches", "2",
            "--batch-size", "16", *compressed,
        )),
        "imagenet": Run("imagenet", ("--epochs", "2", "--decay-epochs", "1", *compressed)),
        "amp": Run("amp", compressed),
        "process_sets": Run("process_sets"),
        "uneven_join": Run("uneven_join"),
        "adasum": Run("adasum"),
        "objects": Run("objects"),
        "collectives": Run("collectives"),
        "embeddings": Run("embeddings"),
        "optimizers": Run("optimizers"),
        "elastic": Run("elastic", ("--fail-at", "7", "33")),
    }
    if size == 2:
        runs |= {
            "mnist_options": Run("mnist", ("--fp16-allreduce", "--gradient-predivide-factor", "2.0")),
            "elastic_smooth": Run("elastic"),
            "imagenet_first": Run("imagenet", ("--epochs", "1", *image_words, *loader)),
            "imagenet_second": Run("imagenet", ("--epochs", "2", *image_words, *loader), "imagenet_first"),
            "imagenet_straight": Run("imagenet", ("--epochs", "2", *image_words)),
        }
    return runs  # fmt: skip


Start = Callable[..., Outcome]


def tasks(size: int, above: Path) -> dict[str, Task]:
    """Create the directories and the data for the plan's scripts."""
    data = above / "data"
    sys.path.insert(0, str(SCRIPTS))
    __import__("digits").digits(str(data), train=True)
    tasks_by_name = {}
    for name, run in plan(size).items():
        path = SCRIPTS / f"{run.script}.py"
        place = ("--data-dir", str(data)) if "--data-dir" in path.read_text() else ()
        # The runner names its own files of a run after the run's directory.
        directory = above / name
        directory.mkdir() if not run.after else directory.symlink_to(above / run.after)
        tasks_by_name[name] = Task(str(path), (*run.words, *place), directory)
    return tasks_by_name


def on_two_ranks(above: Path) -> dict[str, Task]:
    return tasks(2, above)


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return the outcome of one run. The first call runs all scripts that are started in this way."""

    @functools.cache
    def outcomes(way: str, size: int) -> dict[str, Outcome]:
        if (way, size) == ("horovodrun", 2):
            return request.getfixturevalue("shared_job")
        return run_all(way, size, tasks(size, tmp_path_factory.mktemp(way.replace(" ", "-"))))

    def start(way: str, size: int, name: str, *, fine: bool = True) -> Outcome:
        outcome = outcomes(way, size)[name]
        if fine:
            assert (outcome.code, outcome.err) == (0, ""), f"{outcome.out}\n{outcome.err}"
        return outcome

    return start


def load(outcome: Outcome, name: str) -> dict[str, Any]:
    return torch.load(outcome.directory / name)


def assert_close(mine: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert mine.keys() == wanted.keys()
    for name, value in mine.items():
        assert torch.allclose(value, wanted[name], rtol=0, atol=tolerance), name


@every_way
def test_mnist(start: Start, way: str, size: int) -> None:
    """All integration points work. With equal global batches and rates, any number of processes agrees."""
    done = start(way, size, "mnist")
    alone = start("alone", 1, "mnist")
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    assert done.files() == ["mnist.pt"]
    assert_close(load(done, "mnist.pt"), load(alone, "mnist.pt"), 1e-4)
    accuracy = r"^Test set: Average loss: \d\.\d{4}, Accuracy: ([\d.]+)%$"
    assert done.one(accuracy) >= 95.0
    assert done.one(accuracy) == pytest.approx(alone.one(accuracy), abs=0.3)
    assert done.out.count("Test set") == 4
    assert done.out.count("Train Epoch") == 4 * 3


def check_options(done: Outcome) -> None:
    assert (done.code, done.err) == (0, ""), done.out
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    assert done.one(r"^Test set: Average loss: \d\.\d{4}, Accuracy: ([\d.]+)%$") >= 93.0


def test_mnist_with_options(start: Start) -> None:
    check_options(start("horovodrun", 2, "mnist_options"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--use-adasum"], ["--use-adasum", "--fp16-allreduce"]])
def test_mnist_with_adasum(words: list[str], tmp_path: Path) -> None:
    """Adasum runs in its own job, in which the first process creates the data."""
    script = [str(SCRIPTS / "mnist.py"), *words, "--lr", "0.05"]
    check_options(run_each("horovodrun", 2, script, tmp_path))


@every_way
def test_synthetic_benchmark(start: Start, way: str, size: int) -> None:
    done = start(way, size, "synthetic_benchmark")
    number = r"\d+\.\d"
    wanted = [
        "Model: resnet8", "Batch size: 16", f"Number of CPUs: {size}", "Running warmup\\.\\.\\.",
        "Running benchmark\\.\\.\\.", *(f"Iter #{n}: {number} img/sec per CPU" for n in range(3)),
        rf"Img/sec per CPU: {number} \+-{number}", rf"Total img/sec on {size} CPU\(s\): {number} \+-{number}",
    ]
    lines = done.out.splitlines()
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line
    each = done.one(r"^Img/sec per CPU: ([\d.]+)")
    total = done.one(r"^Total img/sec on \d CPU\(s\): ([\d.]+)")
    assert total == pytest.approx(size * each, abs=0.1 * size)


@every_way
def test_imagenet(start: Start, way: str, size: int) -> None:
    done = start(way, size, "imagenet")
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    assert done.files() == ["checkpoint-1.pth.tar", "checkpoint-2.pth.tar"]
    assert done.out.count("Starting from epoch 0") == 1
    assert done.out.count("Train Epoch #") == done.out.count("Validate Epoch #") == 2
    assert done.one(r"^Train Epoch #1: .*, lr=([\d.]+)$") == pytest.approx(0.025 * size * 2)
    assert done.one(r"^Train Epoch #2: .*, lr=([\d.]+)$") == pytest.approx(0.0025 * size * 2)
    assert done.one(r"^Validate Epoch #2: loss=[\d.]+, accuracy=([\d.]+)$") >= 85.0
    groups = load(done, "checkpoint-2.pth.tar")["optimizer"]["param_groups"]
    assert [group["momentum"] for group in groups] == [0.9]


def test_imagenet_resumed(start: Start) -> None:
    """One epoch, and another from its checkpoint, give exactly the result of two epochs in one run."""
    first = start("horovodrun", 2, "imagenet_first")
    second = start("horovodrun", 2, "imagenet_second")
    assert second.out.count("Starting from epoch 1") == 1
    assert (second.out.count("Train Epoch #1"), second.out.count("Train Epoch #2")) == (0, 1)
    assert second.files() == ["checkpoint-1.pth.tar", "checkpoint-2.pth.tar"]
    assert (first.directory / "checkpoint-1.pth.tar").stat().st_mtime <= first.ended
    straight = start("horovodrun", 2, "imagenet_straight")
    assert second.of_ranks(r"weights \w{16}") == straight.of_ranks(r"weights \w{16}")
    assert first.of_ranks(r"weights \w{16}") != straight.of_ranks(r"weights \w{16}")
    mine, wanted = load(second, "checkpoint-2.pth.tar"), load(straight, "checkpoint-2.pth.tar")
    assert_close(mine["model"], wanted["model"], 0.0)


@every_way
def test_amp(start: Start, way: str, size: int) -> None:
    """After an overflow on one rank, all ranks skip that step."""
    done = start(way, size, "amp")
    assert set(done.of_ranks(r"skipped steps .*")) == {"skipped steps [5], scale 2048"}
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    accuracy = done.one(r"^Accuracy: ([\d.]+)%$")
    assert accuracy >= 90.0
    alone = start("alone", 1, "amp")
    assert accuracy == pytest.approx(alone.one(r"^Accuracy: ([\d.]+)%$"), abs=2.0)


@pytest.mark.slow
def test_amp_with_bfloat16(tmp_path: Path) -> None:
    done = run_each("horovodrun", 2, [str(SCRIPTS / "amp.py"), "--amp-dtype", "bfloat16"], tmp_path)
    assert set(done.of_ranks(r"skipped steps .*")) == {"skipped steps [5], scale 2048"}
    assert done.one(r"^Accuracy: ([\d.]+)%$") >= 90.0


@every_way
def test_process_sets(start: Start, way: str, size: int) -> None:
    done = start(way, size, "process_sets", fine=False)
    # Importing mpi4py first starts MPI before ringdance configures it: Open MPI mentions its UCX component.
    noise = "osc_ucx_component" if way == "each by mpiexec" else "no line at all"
    assert [line for line in done.err.splitlines() if line.strip() and noise not in line] == []
    assert done.code == 0
    everybody = float(sum(range(1, size + 1)))
    biases = " ".join(f"{0.5 + rank % 2:.3f}" for rank in range(size))
    for rank in range(size):
        mine = list(range(rank % 2, size, 2))
        own = float(sum(item + 1 for item in mine))
        number = rank % 2 + 1 if size > 1 else 0
        wanted = [
            f"set {number} of ranks {mine}, rank {mine.index(rank)} of {len(mine)} in it",
            f"sum {[own] * 2}",
            f"everybody's sum {[everybody] * 2}",
            f"gathered {[float(item + 1) for item in mine for _ in range(min(item + 1, 2))]}",
            f"from the last {[float(mine[-1] + 1)] * 2}",
            f"biases {biases}",
        ]
        if size > 1:
            average = 1.0 if rank == 0 else (everybody - 1) / (size - 1)
            wanted += [
                f"included in others: {rank > 0}, in first: {rank == 0}",
                f"average of {'others' if rank else 'first'} {[average] * 2}",
                "removed (True, True), id None, again False",
            ]
        wanted += ["ValueError for a copy of the global set: True", f"average {[everybody / size] * 2}"]
        assert re.findall(rf"^rank {rank}: (.*)$", done.out, re.MULTILINE) == wanted


@every_way
def test_uneven_join(start: Start, way: str, size: int) -> None:
    """Joined ranks count as zeros, and averages still divide by the number of all ranks."""
    done = start(way, size, "uneven_join")
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    for epoch in range(2):
        generators = [torch.Generator().manual_seed(100 * epoch + rank) for rank in range(size)]
        for step in range(4 + 3 * (size - 1)):
            model.zero_grad()
            for rank in range(size):
                if step < 4 + 3 * rank:
                    inputs = torch.randn(5, 4, dtype=torch.float64, generator=generators[rank])
                    (((model(inputs) - inputs.sum(1, keepdim=True) - 1) ** 2).mean() / size).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
        batches = sum(4 + 3 * rank for rank in range(size))
        assert f"epoch {epoch}: rank {size - 1} was the last to join, {batches} batches in all\n" in done.out
    assert len(set(done.of_ranks(r"weights .*"))) == 1
    assert_close(load(done, "join.pt"), model.state_dict(), 1e-12)


@every_way
def test_adasum(start: Start, way: str, size: int) -> None:
    done = start(way, size, "adasum", fine=size != 3)
    if size == 3:
        assert done.code != 0
        assert "so the number of ranks must be a power of two, not 3" in done.err
        return
    assert set(done.of_ranks(r"orthogonal .*")) == {f"orthogonal {[2.0] * size}"}
    assert set(done.of_ranks(r"parallel .*")) == {"parallel [3.0, 4.0]"}
    assert set(done.of_ranks(r"skew .*")) == {"skew [1.25, 0.75]" if size == 2 else "skew [1.0, 0.0]"}
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    assert done.one(r"^Accuracy: ([\d.]+)%$") >= 88.0


@every_way
def test_objects(start: Start, way: str, size: int) -> None:
    done = start(way, size, "objects")
    assert set(done.of_ranks(r"seed .*")) == {"seed 637, layers [32, 10], note of 14000"}
    assert "losses of ranks " + " ".join(f"{rank}:{rank + 1}" for rank in range(size)) + "\n" in done.out
    weights = set(done.of_ranks(r"weights .*"))
    assert len(weights) == 1
    assert weights.pop().endswith("of all 1 different")
    alone = start("alone", 1, "objects")
    assert done.one(r"^Loss: ([\d.]+)$") == pytest.approx(alone.one(r"^Loss: ([\d.]+)$"), abs=0.02)
    assert done.one(r"^Accuracy: ([\d.]+)%$") >= 85.0


@every_way
def test_collectives(start: Start, way: str, size: int) -> None:
    done = start(way, size, "collectives", fine=False)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"rank {rank} of {size}: all well" for rank in range(size)]
    # The script uses the old argument `average` twice, and is warned about it.
    lines = done.err.splitlines()
    assert len(lines) == 2 * 2 * size, done.err
    assert sum("collectives.py" in line and "DeprecationWarning" in line for line in lines) == 2 * size


@every_way
def test_embeddings(start: Start, way: str, size: int) -> None:
    done = start(way, size, "embeddings")
    results, alone = load(done, "embeddings.pt"), load(start("alone", 1, "embeddings"), "embeddings.pt")
    assert done.of_ranks(r"\d ways") == [f"{len(alone)} ways"] * size
    for way_of_training, weights in results.items():
        tolerance = 2e-3 if way_of_training == "fp16" else 1e-5
        assert_close(weights, alone[way_of_training], tolerance)
        assert_close(weights, results["dense"], tolerance)


@every_way
def test_optimizers(start: Start, way: str, size: int) -> None:
    done = start(way, size, "optimizers")
    results, alone = load(done, "optimizers.pt"), load(start("alone", 1, "optimizers"), "optimizers.pt")
    assert done.of_ranks(r"\d ways") == [f"{len(alone)} ways"] * size
    for way_of_training, weights in results.items():
        adaptive = way_of_training in ("adam_resumed", "plateau", "two_models")
        assert_close(weights, alone[way_of_training], 1e-3 if adaptive else 1e-5)


@every_way
def test_elastic(start: Start, way: str, size: int) -> None:
    """After two failures, steps since the last commit are repeated, and the result is the same."""
    done = start(way, size, "elastic", fine=False)
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    assert len(lines) == 2, done.err
    assert all(re.search("as if a peer had been lost.* back to the last commit", line) for line in lines)
    assert done.of_ranks(r"\d+ steps, \d+ made") == ["72 steps, 77 made"] * size
    assert re.findall(r"^training from (.*)$", done.out, re.MULTILINE) == [
        "epoch 0, step 0", "epoch 0, step 5", "epoch 1, step 30",
    ]
    assert re.findall(r"^reset: (.*)$", done.out, re.MULTILINE) == [
        f"{size} processes, {left // size} images of this epoch left for each" for left in (1140, 1080)
    ]
    assert len(set(done.of_ranks(r"weights \w{16}"))) == 1
    assert done.one(r"^Accuracy: ([\d.]+)%$") >= 85.0
    if way == "horovodrun":
        smooth = start(way, size, "elastic_smooth")
        assert smooth.of_ranks(r"\d+ steps, \d+ made") == ["72 steps, 72 made"] * size
        assert done.of_ranks(r"weights \w{16}") == smooth.of_ranks(r"weights \w{16}")
