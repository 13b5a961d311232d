"""The tuner on the engines of several ranks: no change alters a result. Also files and joined ranks."""

from __future__ import annotations

import csv
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback_job import bind, job, world_for
from sampled import sampled

from ringdance.core.engine import Engine
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.host.limits import usable_cores
from ringdance.settings import SETTINGS, Settings, load
from ringdance.training.tuning import autotune, dimensions, tuned
from ringdance.training.tuning.dimensions import Tunable
from ringdance.training.tuning.search import Dimension, Measured, Outcome, Point, Search, Trial

SIZES = (1, 9000, 7, 20_000, 3000)
HOSTS = [None, ("a", "a", "b")]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    autotune._kept.clear()
    monkeypatch.setattr(autotune, "tunables", {})  # no matter which bindings other tests have imported


def sums(engine: Engine, step: int, count: int) -> list[int]:
    """Sum several arrays. Sums of integers are exact in any order."""
    works = []
    for number, size in enumerate(SIZES):
        values = np.arange(size) % 1000 * (engine.rank + 1) + step
        description = Description(Collective.ALLREDUCE, ("int64",), ((size,),), ReduceOp.SUM)
        works.append((engine.submit(Request(description, (values,), name=f"g{number}"), wake=False), size))
    wrong = 0
    for work, size in works:
        total = np.arange(size) % 1000 * (count * (count + 1) // 2) + count * step
        wrong += int((work.wait(20.0)[0] != total).sum())
    return [wrong]


def train(steps: int, count: int = 3, before: Callable[[Engine, int], None] | None = None) -> Any:
    def program(engine: Engine) -> tuple[int, Any, dict[str, float]]:
        tuner = autotune.tuner_of(engine)
        wrong = 0
        for step in range(steps):
            if before is not None:
                before(engine, step)
            wrong += sum(sums(engine, step, count))
            engine.recorder.step()
            if engine.on_step is not None:
                engine.on_step()
        assert tuner is not None
        state = engine.sets.registered[0].state
        assert state is not None
        values = state.values()
        if engine.rank == 0:
            tuner.leave()
        return wrong, values, dict(tuner.values)

    return program


@pytest.mark.parametrize("hosts", HOSTS)
def test_whatever_it_tries_the_sums_are_right_and_the_ranks_agree(
    hosts: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Random values, changed every other step, in the order in which each rank reaches them."""

    def at_random(self: Search) -> Any:
        luck = random.Random(5)
        for _ in range(25):
            point = tuple(luck.randrange(len(dimension.values)) for dimension in self.dimensions)
            self.history.append((point, [1.0], "tried"))
            yield Trial(point, 1, 1)
        self.best = point
        return Outcome(point, 0.1, 0.01)

    monkeypatch.setattr(Search, "run", at_random)
    log = tmp_path / "made" / "tune.csv"
    settings = Settings(autotune=True, autotune_log=str(log), chunk_bytes=8192, small_bytes=64)
    results = job(3, train(80), settings, hosts=hosts)
    assert [wrong for wrong, *_ in results] == [0, 0, 0]
    assert len({str(rest) for _, *rest in results}) == 1
    rows = list(csv.DictReader(log.open()))
    assert len(rows) == 26
    columns = {
        "tensor_fusion_threshold": True, "chunk_bytes": True, "cycle_time_ms": False,
        "wire_bytes": hosts is not None, "hierarchical_allreduce": hosts is not None,
    }  # fmt: skip
    assert {name: len({row[name] for row in rows}) > 1 for name in columns} == columns
    assert int(rows[-1]["step"]) > 14 + 35  # the warm-up and the skipped steps
    assert list(rows[0])[:7] == [
        "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled",
        "cycle_time_ms", "tensor_fusion_threshold", "score",
    ]  # fmt: skip
    assert rows[-1]["outcome"] == "final"
    result = json.loads(log.with_suffix(".json").read_text())
    assert result["values"] == results[0][2]
    assert result["job"]["gradients"] == len(SIZES)
    assert "saves 10.0 ± 1.0% of a step's time" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", sampled("a real search", HOSTS, 1), ids=str)
def test_a_real_search_ends(hosts: tuple[str, ...] | None, capsys: Any) -> None:
    settings = Settings(autotune=True, chunk_bytes=32768, small_bytes=64, autotune_steps_per_sample=2)
    results = job(3, train(210), settings, hosts=hosts)
    assert [wrong for wrong, *_ in results] == [0, 0, 0]
    assert len({str(rest) for _, *rest in results}) == 1
    stderr = capsys.readouterr().err
    assert "of a step's time, found after" in stderr or "no improvement found" in stderr
    again = job(3, train(20), settings, hosts=hosts)
    assert [values for _, values, _ in again] == [values for _, values, _ in results]
    assert "the result from before the restart is used: " in capsys.readouterr().err


def tuned_file(path: Path, **changes: Any) -> str:
    """Write the result of a search for the job of ``train``."""
    model = tuned.model_of({f"g{n}.0": ((size,), "int64", 8 * size) for n, size in enumerate(SIZES)})
    hardware = tuned.hardware_of(["a"] * 3, [usable_cores()] * 3)
    values = {"chunk_bytes": 65536, "fusion_threshold": 1 << 20}
    tuned.write(str(path), hardware | model | changes, values, "")
    return str(path)


def test_a_result_is_used_again(tmp_path: Path, capsys: Any) -> None:
    settings = Settings(tuned=tuned_file(tmp_path / "t.json"))
    results = job(3, train(20), settings, hosts=("a", "a", "a"))
    assert all(values.chunk_bytes == 65536 and values.fusion_threshold == 1 << 20 for _, values, _ in results)
    assert "chunk_bytes=64K, fusion_threshold=1M (from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ranks": 4}, "ranks: 4 in the file, 3 here"),
        ({"hosts": 2, "ranks_per_host": [1, 2]}, "hosts: 2 in the file, 1 here; ranks per host: 1, 2 in"),
        ({"cores": [999]}, "cores of the hosts: 999 in the file"),
        ({"gradients": 9}, "gradients: 9 in the file, 5 here"),
        ({"digest": "0"}, "different names or shapes of the gradients"),
        ("chunk_bytes: 5", "not valid JSON"),
        ("[" * 1_000_000, "not valid JSON"),
        ('{"ringdance_tuned": 1, "job": {}, "values": {"threads": 0}}', "threads is 0, expected a number"),
        ('{"ringdance_tuned": 1, "job": {}, "values": {"overlap": 7}}', "overlap is 7, expected"),
    ],
)
def test_a_result_of_another_job_is_refused(
    tmp_path: Path, changes: dict[str, Any] | str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned_file(tmp_path / "t.json", **(changes if isinstance(changes, dict) else {}))
    if isinstance(changes, str):
        Path(path).write_text(changes)
    results = job(3, train(20), Settings(tuned=path), hosts=("a", "a", "a"))
    assert all(values.chunk_bytes != 65536 for _, values, _ in results)
    (line,) = [record.getMessage() for record in caplog.records if "--tuned" in record.getMessage()]
    assert "the settings stay" in line
    assert why in line


def test_files_that_are_no_files_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Search, "run", try_all)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    settings = Settings(tuned=str(fifo), autotune=True, autotune_log=str(fifo), small_bytes=64)
    job(3, train(80), settings, hosts=("a", "a", "a"))
    assert f"{fifo} is not a regular file" in caplog.text
    assert f"log {fifo} cannot be written" in caplog.text


def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OSError, match=r"t\.json"):
        tuned_file(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def try_all(self: Search) -> Any:
    """Try every other value once. None of them is better."""
    start = self.best = tuple(dimension.start for dimension in self.dimensions)
    for number, dimension in enumerate(self.dimensions):
        for index in range(len(dimension.values)):
            yield from self._measure((*start[:number], index, *start[number + 1 :]), "tried", 1)
    return Outcome(start)


def test_a_search_that_finds_nothing_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "run", try_all)
    path = tuned_file(tmp_path / "t.json")
    settings = Settings(tuned=path, autotune=True, autotune_log=str(tmp_path / "new.csv"), small_bytes=64)
    results = job(3, train(80), settings, hosts=("a", "a", "a"))
    assert all(values.chunk_bytes == 65536 and values.fusion_threshold == 1 << 20 for _, values, _ in results)
    assert tuned.read(str(tmp_path / "new.json"))["values"] == tuned.read(path)["values"]


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_search_that_finds_nothing_leaves_all_as_it_was(
    hosts: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fruitless search restores everything, even what the tuner does not see or ranks set differently."""
    monkeypatch.setattr(Search, "run", try_all)
    state = threading.local()
    set_to = {"threads": Tunable(lambda: state.threads, lambda n: setattr(state, "threads", n), lambda: 8)}
    monkeypatch.setattr(autotune, "tunables", set_to)

    def program(engine: Engine) -> bool:
        state.threads = own = 8 if engine.rank == 0 else 2
        exchange = engine.sets.registered[0].state.exchange  # type: ignore[union-attr]
        before = {name: value for name, value in vars(exchange).items() if isinstance(value, int)}
        wrong, _, values = train(130)(engine)
        after = {name: getattr(exchange, name) for name in before}
        return (wrong, state.threads, after, values) == (0, own, before, {})

    assert job(3, program, Settings(autotune=True), hosts=hosts) == [True] * 3


@pytest.mark.parametrize(("first", "others"), [
    ({"HOROVOD_FUSION_THRESHOLD": str(128 << 20)}, {}),
    ({}, {"HOROVOD_FUSION_THRESHOLD": str(128 << 20)}),
    ({"RINGDANCE_AUTOTUNE_WARMUP_SAMPLES": "5"}, {"RINGDANCE_AUTOTUNE_STEPS_PER_SAMPLE": "2"}),
    ({"RINGDANCE_CYCLE_TIME": "3"}, {"RINGDANCE_CYCLE_TIME": "0.5"}),
])  # fmt: skip
def test_ranks_of_different_settings_tune_alike(first: dict[str, str], others: dict[str, str]) -> None:
    common = {"RINGDANCE_AUTOTUNE": "1", "RINGDANCE_SMALL_BYTES": "64"}
    settings = [load({**common, **own}) for own in (first, others, others)]
    for setting in SETTINGS:
        same = len({getattr(loaded, setting.name) for loaded in settings}) == 1
        assert same or not setting.common  # a job with such settings starts

    def rank(transport: Any) -> tuple[int, Any, dict[str, float]]:
        engine = Engine(transport, settings[transport.rank])
        with bind(engine):
            try:
                return train(90)(engine)  # type: ignore[no-any-return]
            finally:
                engine.shutdown()

    results = world_for(settings[0], 3).run(rank, timeout=None)
    assert [wrong for wrong, *_ in results] == [0, 0, 0]
    assert len({str((values._replace(cycle_time=0), rest)) for _, values, rest in results}) == 1


def test_a_rank_that_leaves_in_mid_search_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """A rank that leaves during a search gets its values back, and no uncompared result is written."""

    def other(self: Search) -> Any:
        start = self.best = tuple(dimension.start for dimension in self.dimensions)
        point: Point = tuple(dimension.start - 1 for dimension in self.dimensions)
        while True:
            yield from self._measure(point, "tried", 1)
            self.best = start

    monkeypatch.setattr(Search, "run", other)
    state = threading.local()
    set_to = {"threads": Tunable(lambda: state.threads, lambda n: setattr(state, "threads", n), lambda: 8)}
    monkeypatch.setattr(autotune, "tunables", set_to)

    def program(engine: Engine) -> tuple[int, int]:
        state.threads = 8
        tuner = autotune.tuner_of(engine)
        assert tuner is not None
        for step in range(20):
            sums(engine, step, 3)
            engine.recorder.step()
            tuner.on_step()
        tried = state.threads
        tuner.restore()
        if engine.rank == 0:
            tuner.leave()
        return tried, state.threads

    log = str(tmp_path / "tune.csv")
    assert job(3, program, Settings(autotune=True, autotune_log=log)) == [(4, 8)] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["tune.csv"]
    assert "the job ended before the search did " in capsys.readouterr().err


def test_the_job_s_own_value_is_always_tried() -> None:
    """It is tried even above the largest chunk allowed, or if all larger chunks are equal."""
    job = {"fusion_threshold": 128 << 20, "chunk_bytes": 256 << 10, "wire_bytes": 16 << 20, "flat": False}
    answers = [{"values": job, "tunables": {}, "eager": False, "fixed": ["hierarchical"]}]
    rooms = {"chunk_bytes": 512 << 10, "wire_bytes": 2 << 20}
    result = dimensions.dimensions_of(answers, {}, (9, 1 << 18, 6 << 20), rooms, 64, True)
    assert [(d.name, d.values[d.start], d.values[-2:]) for d in result] == [
        ("fusion_threshold", 128 << 20, (1 << 17, 128 << 20)),
        ("chunk_bytes", 256 << 10, (256 << 10, 512 << 10)),
        ("wire_bytes", 16 << 20, (2 << 20, 16 << 20)),
    ]
    file = {"fusion_threshold": 99}
    (of_file, *_) = dimensions.dimensions_of(answers, file, (9, 1 << 18, 0), rooms, 64, True)
    assert of_file.values[of_file.start] == 99


def test_with_16_bit_floats_the_stages_stay() -> None:
    def program(engine: Engine) -> list[str]:
        tuner = autotune.tuner_of(engine)
        assert tuner is not None
        values = np.ones(40_000, np.float16)
        half = Description(Collective.ALLREDUCE, ("float16",), (values.shape,), ReduceOp.SUM)
        for step in range(20):
            engine.submit(Request(half, (values,), name="h"), wake=False).wait(20.0)
            sums(engine, step, 3)
            engine.recorder.step()
            tuner.on_step()
        assert tuner._search is not None
        return [dimension.name for dimension in tuner._search.dimensions]

    assert job(3, program, Settings(autotune=True), hosts=("a", "a", "b")) == [
        ["fusion_threshold", "chunk_bytes", "wire_bytes"]
    ] * 3


def test_ranks_that_join_end_the_search(capsys: Any) -> None:
    def join(engine: Engine) -> None:
        engine.submit(Request(Description(Collective.JOIN)), wake=False).wait(20.0)

    def program(engine: Engine) -> int:
        tuner = autotune.tuner_of(engine)
        assert tuner is not None
        wrong, before = 0, tuner._state.values()
        for step in range(40):
            last = step >= 22
            if engine.rank == 2 and last:
                break
            wrong += sum(sums(engine, step, 2 if last else 3))
            engine.recorder.step()
            if engine.on_step is not None:
                engine.on_step()
        join(engine)
        assert tuner.done
        assert tuner._state.values() == before  # neither the tried values nor the search's limits
        wrong += sum(sums(engine, 0, 3))
        return wrong

    assert job(3, program, Settings(autotune=True, small_bytes=64)) == [0, 0, 0]
    assert "a rank has called join()" in capsys.readouterr().err


def test_a_join_of_all_ranks_while_it_waits(capsys: Any) -> None:
    """What was submitted is withdrawn on all ranks and submitted again."""

    def join(engine: Engine, step: int) -> None:
        if step in (14, 23, 26, 30):
            engine.submit(Request(Description(Collective.JOIN)), wake=False).wait(20.0)

    results = job(3, train(200, before=join), Settings(autotune=True, small_bytes=64))
    assert [wrong for wrong, *_ in results] == [0, 0, 0]
    assert " steps" in capsys.readouterr().err


def test_a_horovod_variable_fixes_its_value(capsys: Any) -> None:
    settings = load({"RINGDANCE_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "4096"})
    results = job(3, train(30), settings)
    assert all(values.fusion_threshold == 4096 for _, values, _ in results)
    assert "fusion_threshold" not in results[0][2]


@pytest.mark.parametrize(("size", "settings", "why"), [
    (1, Settings(autotune=True), "in a job of one rank"),
    (2, Settings(autotune=True, deterministic=True), "in deterministic mode"),
])  # fmt: skip
def test_where_it_is_off_it_says_so(
    size: int, settings: Settings, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert job(size, lambda engine: autotune.tuner_of(engine) is None, settings) == [True] * size
    assert f"autotune is off {why}" in caplog.text


def test_dimensions_and_texts() -> None:
    assert Measured([1.0], 0.5).exposed == 0.5
    dimension = dimensions._dimension("chunk_bytes", (1, 2, 4), 3, 4)
    assert dimension == Dimension("chunk_bytes", (1, 2, 3, 4), 2, 1, 1, usual=3)
    assert autotune._text({"chunk_bytes": 3 << 17, "cycle_time": 0.5, "overlap": 1}) == (
        "chunk_bytes=384K, cycle_time=0.5, overlap=1"
    )
