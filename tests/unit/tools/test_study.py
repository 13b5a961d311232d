"""A study: what Optuna makes of it, and what is on disk."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import shlex
import statistics
import sys
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.tools.cli import main
from ringdance.tools.search import REPORT, STOP
from ringdance.tools.search.space import Space, fill, parse_space
from ringdance.tools.search.study import Study

pytest.importorskip("optuna")
BRANIN = {"x": {"low": -5.0, "high": 10.0}, "y": {"low": 0.0, "high": 15.0}}


def space(sampler: str = "random", seed: int = 0, **more: object) -> Space:
    return parse_space({"parameters": BRANIN, "sampler": {"name": sampler, "seed": seed}} | more)


def branin(x: float, y: float) -> float:
    b, c, t = 5.1 / (4 * math.pi**2), 5 / math.pi, 1 / (8 * math.pi)
    return (y - b * x**2 + c * x - 6) ** 2 + 10 * (1 - t) * math.cos(x) + 10


def searched(directory: Path, sampler: str, seed: int) -> float:
    study = Study(directory, space(sampler, seed))
    for _ in range(40):
        trial = study.trial()
        study.tell(trial, "COMPLETE", branin(**trial.params))
    best = study.best()
    assert best is not None
    assert best.value is not None
    return best.value


def test_tpe_is_better_than_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TPE beats random search: median of five seeds, 40 trials each, on Branin's function (minimum 0.398)."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    medians = {
        name: statistics.median(searched(tmp_path / f"{name}{seed}", name, seed) for seed in range(5))
        for name in ("tpe", "random")
    }
    print(medians)
    assert medians["tpe"] < medians["random"]


def test_pruning_saves_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty curves with ten steps, the best one is kept and most others stop early."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    study = Study(tmp_path, space(pruner={"name": "median", "n_startup_trials": 2}))
    steps, ends = 0, []
    for _ in range(20):
        trial = study.trial()
        end = branin(**trial.params)
        ends.append(end)
        for step in range(10):
            steps += 1
            trial.report(end * (2 - step / 10), step)
            if trial.should_prune():
                study.tell(trial, "PRUNED")
                break
        else:
            study.tell(trial, "COMPLETE", end)
    best = study.best()
    assert best is not None
    assert best.value == min(ends)
    assert steps < 140


def test_a_resumed_study_repeats_no_random_numbers(tmp_path: Path) -> None:
    values = []
    for _ in range(4):
        study = Study(tmp_path, space())
        trial = study.trial()
        values.append(trial.params["x"])
        study.tell(trial, "COMPLETE", 1.0)
        study._lock.close()
    whole = Study(tmp_path / "whole", space())
    assert [whole.trial().params["x"] for _ in range(4)] == values
    assert len(set(values)) == 4


def test_what_a_kill_in_the_middle_of_a_record_leaves_is_removed(tmp_path: Path) -> None:
    study = Study(tmp_path, space())
    number = study.trial().number
    study._lock.close()
    with open(tmp_path / "journal.log", "a") as file:
        file.write('{"op_code":5,"wor')
    (tmp_path / "journal.log.lock").symlink_to("journal.log")
    again = Study(tmp_path, space())
    assert [trial.number for trial in again.trials("RUNNING")] == [number]
    assert set(again.trial(number).params) == {"x", "y"}


def test_the_best_command_has_a_directory_without_the_trials_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that continues from the files it finds there would have nothing left to do."""
    study = Study(tmp_path, space())
    trial, directory = study.trial(), tmp_path / "trials" / "0000"
    command = ["train", "--out={dir}/run", "{params}", "{x}"]
    trial.set_user_attr("command", fill(command, trial.params, directory, slots="0"))
    study.tell(trial, "COMPLETE", 1.0)
    study._lock.close()
    assert main(["search", "best", str(tmp_path)]) == 0
    _, out, params, x = shlex.split(capsys.readouterr().out)
    assert out == f"--out={tmp_path}/best/0000/run"
    assert Path(out.removeprefix("--out=")).parent.is_dir()
    assert json.loads(Path(params).read_text()) == trial.params
    assert float(x) == trial.params["x"]


def test_one_searcher_at_a_time_and_one_space(tmp_path: Path) -> None:
    study = Study(tmp_path, space())
    with pytest.raises(LaunchError, match="another `ringdance search` is using this study"):
        Study(tmp_path, space())
    study._lock.close()
    other = parse_space({"parameters": {**BRANIN, "x": {"low": -5.0, "high": 9.0}}})
    with pytest.raises(LaunchError, match=r"belongs to another search space: .*10\.0.* not .*9\.0"):
        Study(tmp_path, other)
    (tmp_path / "journal.log").write_text("{}\n")
    with pytest.raises(LaunchError, match=r"journal\.log is damaged, or was not written by"):
        Study(tmp_path)


def test_results_of_another_command_are_not_mixed(tmp_path: Path) -> None:
    """The command may be changed as long as the study has no results."""
    study = Study(tmp_path, space(), ["python", "wrong.py"])
    study.tell(study.trial(), "FAIL")
    study._lock.close()
    study = Study(tmp_path, space(), ["python", "t.py", "{x}"])
    study.tell(study.trial(), "COMPLETE", 1.0)
    study._lock.close()
    with pytest.raises(LaunchError, match=r"another command: `python t.py '{x}'`, not `python u`"):
        Study(tmp_path, space(), ["python", "u"])
    gc.collect()
    Study(tmp_path, space(), ["python", "t.py", "{x}"])


@pytest.mark.parametrize("damage", ["", "null\n", "[]\n", '{"op_code":99}\n', "[" * 100_000 + "\n"])
def test_a_damaged_journal_is_named_and_its_trials_are_kept(damage: str, tmp_path: Path) -> None:
    study = Study(tmp_path, space())
    (tmp_path / "trials" / f"{study.trial().number:04}").mkdir(parents=True)
    study._lock.close()
    (tmp_path / "journal.log").write_text(damage)
    for again in (None, space()):
        with pytest.raises(LaunchError, match=r"journal\.log is damaged"):
            Study(tmp_path, again)
    assert (tmp_path / "trials" / "0000").exists()


def test_samplers_that_end_by_themselves_or_lack_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"x": [1, 2, 3]}
    grid = {"name": "grid", "search_space": parameters}
    study = Study(tmp_path / "grid", parse_space({"parameters": parameters, "sampler": grid}))
    tried = []
    while not study.exhausted:
        trial = study.trial()
        tried.append(trial.params["x"])
        study.tell(trial, "COMPLETE", 1.0)
    assert sorted(tried) == [1, 2, 3]
    monkeypatch.setitem(sys.modules, "cmaes", None)
    study = Study(tmp_path / "cmaes", space("cmaes"))
    study.tell(study.trial(), "COMPLETE", 1.0)
    with pytest.raises(LaunchError, match=r"sampler: cmaes: .*cmaes"):
        study.trial()


def test_other_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trials" / "0000").mkdir(parents=True)
    (tmp_path / "journal.log").write_text("no end of line")
    with pytest.raises(LaunchError, match="contains other files and is not a study"):
        Study(tmp_path, space())
    assert (tmp_path / "journal.log").read_text() == "no end of line"
    assert {path.name for path in tmp_path.iterdir()} == {"trials", "journal.log"}
    (tmp_path / "new").mkdir()

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            Study(tmp_path / "new", space())
    gc.collect()
    assert Study(tmp_path / "new", space()).trials() == []


def test_unknown_samplers_and_options(tmp_path: Path) -> None:
    for more, message in [
        ({"sampler": "tpee"}, "'tpee' is not known.*random.*tpe"), ({"pruner": "x"}, "known.*median, nop"),
        ({"pruner": {"n_startup_trials": 1}}, "'' is not known.*median"),
        ({"sampler": {"name": "tpe", "sead": 1}}, "sampler: tpe: .*sead"),
    ]:  # fmt: skip
        with pytest.raises(LaunchError, match=message):
            Study(tmp_path / "study", parse_space({"parameters": BRANIN} | more))
    assert not (tmp_path / "study").exists()
    study = Study(tmp_path / "study", space(pruner={"name": "percentile", "percentile": 10.0}))
    assert type(study.study.pruner).__name__ == "PercentilePruner"


def test_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text("parameters: {x: [1, 2]}")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(["search", "space.yaml", "--", "true", "{x}"]) == 2
    assert capsys.readouterr().err == "ringdance search: disk: No space left on device\n"


def test_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ringdance

    for name in ("RINGDANCE_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    ringdance.report(1.0)  # not in a search
    path = tmp_path / "report.jsonl"
    monkeypatch.setenv(REPORT, str(path))
    ringdance.report(0.5, step=3)
    assert path.read_text() == '{"value": 0.5, "step": 3}\n'
    (tmp_path / f"report.jsonl{STOP}").touch()
    with pytest.raises(SystemExit, match="pruned"):
        ringdance.report(1)
    monkeypatch.setenv("RINGDANCE_RANK", "1")
    ringdance.report(1)
    assert len(path.read_text().splitlines()) == 2
    monkeypatch.setenv("RINGDANCE_RANK", "0")
    monkeypatch.setenv(REPORT, str(tmp_path / "absent" / "report.jsonl"))
    with pytest.raises(FileNotFoundError, match="--study that all hosts share"):
        ringdance.report(1)


def test_a_study_whose_maker_was_killed_at_once_is_named(tmp_path: Path) -> None:
    study = Study(tmp_path, space())
    journal = tmp_path / "journal.log"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if "definition" not in line))
    study._lock.close()
    with pytest.raises(LaunchError, match=r"journal\.log is damaged, or was not written by"):
        Study(tmp_path)
    assert Study(tmp_path, space()).space == study.space
    assert Study(tmp_path).space == parse_space(study.space.definition())
