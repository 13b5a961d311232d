"""Shared parts of the recipes' training scripts, with a model of three numbers."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled import seed_of_the_day

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError
from ringdance.recipes import models, score, training
from ringdance.recipes.training import Position, Training


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Model:
    """A model of three weights with predefined evaluation results."""

    framework = "none"

    def __init__(self, *scores: float) -> None:
        self.scores, self.weights = list(scores), np.zeros(3)

    def evaluate(self) -> dict[str, float]:
        return {"top1": self.scores.pop(0), "count": 6}

    def described(self, at: Position, found: dict[str, float]) -> str:
        return ""

    def average_statistics(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]

    def export(self, directory: Path) -> None:
        np.savetxt(directory / "weights", self.weights)


def begin(
    model: Model, export: Path | None = None, checkpoints: Path | None = None, board: str = "",
    price: float | None = None,
) -> Training:
    options = Namespace(
        checkpoints=checkpoints, export=export and str(export), keep=3, tensorboard=board,
        price_per_hour=price, patience=2,
    )  # fmt: skip
    return Training(options, model, {}, "images", 10, 1, "validation", "top1")


def test_an_export_replaces_nothing_else(tmp_path: Path) -> None:
    page, model = tmp_path / "page", tmp_path / "model"
    page.mkdir()
    (page / "model.json").write_text("{}")  # for example, written by TensorFlow.js
    with pytest.raises(SystemExit, match="contains other files"):
        begin(Model(), page)
    assert (page / "model.json").exists()
    begin(Model(), model).close({})
    begin(Model(), model).close({})
    (model / "scores.tsv").write_text("1\n")
    with pytest.raises(SystemExit, match=r"contains other files, such as scores\.tsv"):
        begin(Model(), model)
    assert (model / "scores.tsv").exists()


def test_an_export_goes_where_a_link_leads(tmp_path: Path) -> None:
    """Files that a killed process has left next to the export are removed."""
    (tmp_path / "disk" / ".model.partial").mkdir(parents=True)
    (tmp_path / "model").symlink_to("disk/model")  # the link's target does not exist yet
    for _ in range(2):
        begin(Model(), tmp_path / "model").close({})
    assert (tmp_path / "model").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_model_stays_if_it_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    run = begin(Model(), tmp_path / "model")
    monkeypatch.setattr(models.os, "replace", busy)
    busily = r"--export .*/model: Device or resource busy.*\. The model is in .*/\.model\.partial"
    with pytest.raises(SystemExit, match=busily):
        run.close({})
    assert (tmp_path / ".model.partial" / "weights").exists()


def test_what_is_written_there_while_it_is_trained_stays(tmp_path: Path) -> None:
    run = begin(Model(), tmp_path / "model", board=str(tmp_path / "model" / "board"))
    (tmp_path / "model" / "mine").mkdir(parents=True, exist_ok=True)
    with pytest.raises(SystemExit, match=r"other files, such as \w+\. The model is in .*/\.model\.part"):
        run.close({})
    assert (tmp_path / "model" / "mine").exists()
    assert (tmp_path / ".model.partial" / "weights").exists()


def test_the_model_before_is_back_after_a_kill_between_two_names(tmp_path: Path) -> None:
    begin(Model(), tmp_path / "model").close({})
    (tmp_path / "model").rename(tmp_path / ".model.old")
    failing = Model()
    failing.export = lambda directory: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(SystemExit, match="division by zero"):
        begin(failing, tmp_path / "model").close({})
    assert (tmp_path / "model" / "weights").exists()


def test_the_best_model_is_exported_that_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, state: dict[str, Any]) -> None:
        time.sleep(0.5)
        write(path, state)

    write = training.write
    monkeypatch.setattr(training, "write", slow)
    run = begin(model := Model(0.9, 0.5), tmp_path / "model", tmp_path / "kept")
    for step in (1, 2):
        model.weights[:], run.at.step = step, step
        run.evaluate()
    run.close({})
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "model" / "weights"), 1)


def test_after_a_kill_the_patience_is_that_of_an_unbroken_training(tmp_path: Path) -> None:
    scores = [0.5, 0.6, 0.9, 0.4, 0.95, 0.3, 0.3]  # scores of steps 1 to 7

    def run(first: int, model: Model, end: int) -> list[bool]:
        run_ = begin(model, checkpoints=tmp_path)
        assert run_.resume() == (first > 1)
        over = []
        for step in range(first, end + 1):
            run_.at.step = step
            over.append(run_.evaluate())
            if step == 1:
                run_.save(run_.files)
        run_.close({})
        return over

    assert run(1, Model(*scores), 3) == [False] * 3  # the checkpoint is of step 1, the best model of step 3
    assert run(2, Model(0.4, 0.5, 0.8), 4) == [False] * 3, "steps up to the best one do not count"
    with contextlib.closing(hvd.Checkpoints(tmp_path, name="best")) as best:
        assert best.numbers() == [3]
    assert run(2, Model(*scores[1:]), 7) == [False] * 5 + [True]
    with contextlib.closing(hvd.Checkpoints(tmp_path, name="best")) as best:
        assert best.numbers() == [5]


def test_the_cost_is_that_of_the_time_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cost of a resumed training run includes the time of the run before."""
    for hours, price in ((2, None), (3, 4.0)):
        run = begin(Model(), checkpoints=tmp_path, price=price)
        assert run.resume() == (hours > 2)
        run.progress.began -= hours * 3600
        run.at.step += 1
        run.save(run.files)
        run.close({})
    assert capsys.readouterr().out.splitlines() == ["done in 2:00:00", "done in 5:00:00, cost 20.00"]


def test_a_score_that_is_not_a_number_ends_the_training_with_a_checkpoint(tmp_path: Path) -> None:
    run = begin(Model(np.nan), tmp_path / "model", tmp_path / "kept")
    run.at.step = 3
    with pytest.raises(SystemExit, match="The top1 on the validation images is nan after step 3, so no"):
        run.evaluate()
    assert not (tmp_path / "model").exists()
    with contextlib.closing(hvd.Checkpoints(tmp_path / "kept")) as kept:
        assert kept.numbers() == [3]


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    run = begin(model := Model(), checkpoints=tmp_path)
    run.save(run.files)
    model.weights[1], run.at.step = np.nan, 7
    with pytest.raises(SystemExit, match="weights is not finite after step 7: training has diverged"):
        run.save(run.files)
    assert run.files is not None
    run.files.wait()
    assert run.files.numbers() == [0]
    run.close({})


@pytest.mark.parametrize("content", [b"", b"PK", np.lib.format.magic(1, 0), b"position"])
def test_a_checkpoint_of_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    with contextlib.closing(hvd.Checkpoints(tmp_path)) as saved:
        saved.save(3, lambda path: path.write_bytes(content))
    run = begin(Model(), checkpoints=tmp_path)
    with pytest.raises(SystemExit, match="checkpoint 3 is damaged or not a checkpoint"):
        run.resume()
    run.close({})


def test_a_copy_with_any_other_byte_is_named_or_as_before(tmp_path: Path) -> None:
    """Copies have no manifest with a checksum. The zip file checksums values, but not their names."""
    run = begin(Model(), checkpoints=tmp_path)
    run.model.weights[:] = 1, 2, 3  # type: ignore[attr-defined]
    run.save(run.files)
    run.close({})
    path = tmp_path / "checkpoint-00000000"
    (tmp_path / f".{path.name}.json").unlink()
    content, read = path.read_bytes(), 0
    places = range(seed_of_the_day() % 4, len(content), 4)
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        run = begin(Model(), checkpoints=tmp_path)
        with contextlib.suppress(SystemExit):
            assert run.resume()
            assert run.model.weights.tolist() == [1, 2, 3]  # type: ignore[attr-defined]
            read += 1
        run.close({})
    assert read < len(places) / 3


def test_positions_of_another_version_are_named(tmp_path: Path) -> None:
    run = begin(Model(), checkpoints=tmp_path)
    run.at = Namespace(step=1, turn=2)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "asdict", vars)
        run.save(run.files)
    with pytest.raises(SystemExit, match=r"checkpoint 1 is damaged or not a checkpoint: .*'turn'"):
        run.resume()
    run.close({})


def test_arrays_alone_are_written_by_an_older_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before NumPy 2.2, savez() took ``allow_pickle=False`` for an array of that name."""
    save = np.savez
    older = lambda file, **arrays: save(file, **{f"a/{name}": a for name, a in arrays.items()})  # noqa: E731
    monkeypatch.setattr(np, "savez", older)
    training.write(tmp_path / "file", {"one": np.ones(2)})
    with np.load(tmp_path / "file") as saved:
        assert saved.files == ["a/one"]


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with models.text_file(str(pipe)) as file:
        file.write("0.5\n")
    assert os.read(reader, 10) == b"0.5\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    (tmp_path / "link").symlink_to("scores")
    with models.text_file(str(tmp_path / "link")) as file:
        file.write("0.5\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "scores").read_text() == "0.5\n"
    with models.text_file(os.devnull), models.text_file(None):
        pass
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """Limit the size of files to 20 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_the_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with little_room(), pytest.raises(OSError, match=r"File too large: '.*/scores\.tsv'"):
        with models.text_file(str(tmp_path / "scores.tsv")) as file:
            file.write("0.5\n" * 100)
    run = begin(Model(), tmp_path / "model")
    with little_room(), pytest.raises(SystemExit, match=r"--export .*/model: File too large \(.* MB are"):
        run.close({})
    assert not [*tmp_path.iterdir()]
    run = begin(Model(), checkpoints=tmp_path)
    with little_room():
        run.save(run.best)
        with pytest.raises(SystemExit, match=r"best-0+ could not be written: File too large \(.* MB are"):
            run.save(run.best)
    assert {path.name for path in tmp_path.iterdir()} == {".best-N.lock"}


def test_two_writers_of_one_text_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    code = "import sys; from ringdance.recipes.models import text_file\n" \
           "with text_file(sys.argv[1]) as file: file.write('theirs')"  # fmt: skip
    with models.text_file(str(path)) as file:
        file.write("ours")
        file.flush()
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        assert path.read_text() == "theirs"
    assert path.read_text() == "ours"


def test_a_damaged_export_is_named_before_it_is_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    begin(Model(), model).close({})
    assert [*models.whole_model(model)["checksums"]] == ["weights"]
    weights = (model / "weights").read_text()
    (model / "weights").write_text(weights.replace("0", "1", 1))
    with pytest.raises(ArgumentError, match="model/weights is damaged: its checksum does not match"):
        models.whole_model(model)
    for name in ("weights", "model.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
        with pytest.raises(ArgumentError, match=f"model/{name} is missing, or is not a regular file"):
            models.whole_model(model)


def test_a_package_that_is_missing_is_named_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit, match=r"--tensorboard needs tensorboardX: .*pip install tensorboardX"):
        begin(Model(), board="board")


def test_scoring_is_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(score, "whole_model", lambda model: {"classes": ["cat"]})
    monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path / "model"), "data"])
    left_out = iter((0, 7))
    monkeypatch.setattr(score, "score_images", lambda given, about: next(left_out))
    score.main()
    with pytest.raises(SystemExit, match="3"):
        score.main()
    monkeypatch.setattr(score.hvd, "size", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        score.main()
    assert "runs as one process" in capsys.readouterr().err
