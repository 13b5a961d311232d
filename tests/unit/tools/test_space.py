"""The file of a search: allowed content, and messages about mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringdance.errors import LaunchError
from ringdance.tools.cli import main
from ringdance.tools.search.searcher import places
from ringdance.tools.search.space import (
    Parameter,
    Reader,
    Space,
    check_command,
    fill,
    parse_space,
    read_space,
)
from ringdance.tools.search.study import Study

pytest.importorskip("optuna")
GOOD = {"parameters": {"lr": {"low": 1e-4, "high": 1, "log": True}, "batch": [16, 32]}}


def space(text: str, directory: Path) -> Space:
    path = directory / "space.yaml"
    path.write_text(text)
    return read_space(path)


def test_kinds_of_parameters(tmp_path: Path) -> None:
    """Numbers such as `1e-4` count as numbers, although YAML reads them as text."""
    search_space = space(
        "parameters:\n  lr: {low: 1e-4, high: 1, log: true}\n  momentum: {low: 0, high: 0.9}\n"
        "  batch: {low: 16, high: 64, step: 16}\n  optimizer: [sgd, adam]\n",
        tmp_path,
    )
    assert search_space.parameters == {
        "lr": Parameter("float", {"low": 1e-4, "high": 1, "log": True}),
        "batch": Parameter("int", {"low": 16, "high": 64, "step": 16}),
        "momentum": Parameter("float", {"low": 0, "high": 0.9}),
        "optimizer": Parameter("categorical", {"choices": ["sgd", "adam"]}),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping"),
        ("parameters: {}", "the space is empty"),
        ("trials: 3", "the space is empty"),
        ("parameters: {lr: {low: 2, high: 1}}", "lr: .*low=2, high=1"),
        ("parameters: {lr: {low: 0, high: 1.0, log: true}}", "lr: .*low=.*log"),
        ("parameters: {lr: {low: -1.0, high: 1.0, log: true}}", "lr: .*low=.*log"),
        ("parameters: {lr: {low: 1}}", "lr: .*Write {low: 0.01, high: 1"),
        ("parameters: {lr: {low: much, high: 1}}", "lr: low, high and step must be finite numbers. Write "),
        ("parameters: {lr: {low: true, high: 1}}", "lr: low, high and step must be finite numbers. Write "),
        ("parameters: {lr: {lwo: 1, high: 1}}", "lr: unknown key 'lwo'. Known: low, high, step, log"),
        ("parameters: {lr: {low: 1, high: 2, when: {a: b}}}", "lr: unknown key 'when'. Known: low, high"),
        ("parameters: {lr: {choices: [1], when: {a: b}}}", "lr: unknown key 'when'. Known: choices"),
        ("parameters: {lr: {choices: ab}}", "lr: choices must be a list"),
        ("parameters: {lr: {low: .nan, high: 1.0}}", "lr: low, high and step must be finite"),
        ("parameters: {lr: {low: 0.0, high: .inf}}", "lr: low, high and step must be finite"),
        ("parameters: {lr: [0, 0.1, false]}", "lr: Optuna considers 0 and false equal"),
        ("[" * 100_000, "recursion"),
        ("parameters: {lr: []}", "lr: "),
        ("parameters: {lr: 3}", "lr must be a mapping"),
        ("parameters: {trial: [1]}", "'trial' is not a valid name"),
        ("parameters: {lr: [1]}\ntrails: 3", "unknown key 'trails'. Known: parameters, objective, trials"),
        ("parameters: {lr: [1]}\ntrials: '12'", "trials must be a whole number, 1 or more. Received: '12'"),
        ("parameters: {lr: [1]}\ntrials: none", "trials must be a whole number, 1 or more. Received: 'none'"),
        ("parameters: {lr: [1]}\nobjective: {goal: max}", "be maximize or minimize. Received: 'max'"),
        ("parameters: {lr: [1]}\nobjective: {line: 'a('}", "line must be a regular expression"),
        ("parameters: {lr: [1]}\nobjective: {line: 'a'}", "with a group .* Received: 'a'"),
        ("parameters: {lr: [1]}\nobjective: {line: '(?P<step>a)'}", "with a group for the number"),
        ("parameters: [", "space.yaml: "),
    ],
)
def test_mistakes_in_the_file(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=said) as caught:
        space(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/space.yaml: ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python t.py {lrr} {batch}", r"no trial receives parameter lr. Write {lr} into the command"),
        ("python t.py {lr} ${batch}", "no trial receives parameter batch"),
        ("python t.py", "no trial receives parameter lr, batch"),
    ],
)
def test_every_parameter_gets_to_the_trials(command: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        check_command(parse_space(GOOD), command.split())


def test_placeholders_are_filled(tmp_path: Path) -> None:
    """Other braces stay unchanged."""
    words = [
        "--lr={lr}",
        "{batch}{batch}",
        "${lr}",
        "{params}",
        "{trial}",
        '{"a": 1}',
        "{on}",
        "{off}",
        "{slots}",
    ]
    place = tmp_path / "0012"
    filled = fill(words, {"lr": 0.0001, "batch": 32, "on": True}, place, "3,4")
    params = f"{place}/params.json"
    assert filled == ["--lr=0.0001", "3232", "${lr}", params, "12", '{"a": 1}', "true", "{off}", "3,4"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("space.yaml", "journal.log"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(LaunchError, match=r"space\.yaml is not a regular file"):
        read_space(tmp_path / "space.yaml")
    with pytest.raises(LaunchError, match=r"journal\.log is not a regular file"):
        Study(tmp_path)


@pytest.mark.parametrize(
    ("objective", "text", "values", "result"),
    [
        ({"line": r"loss (\S+)"}, "loss 3\nother\nloss nothing\nloss 1.5\n", [(0, 3), (1, 1.5)], 1.5),
        ({"line": r"epoch (?P<step>\S+) loss (\S+)"}, "epoch 3 loss 7\nepoch 1/9 loss 2\nepoch inf loss 1\n",
         [(3, 7)], 7),
        ({"line": r"(?P<step>\d+) (?P<value>\S+)", "take": "best"}, "e 3 1\n4 2\n", [(3, 1), (4, 2)], 1),
        ({"goal": "maximize", "take": "best"},
         '{"value": 1, "step": 7}\n{"value": 0.5}\n[]\nx\n{"loss": 3}\n', [(7, 1), (1, 0.5)], 1),
        ({}, '{"value": 1, "step": null}\n{"value": 2}\n{"value": 1, "step": 1e999}\n', [(0, 1), (1, 2)], 2),
    ],
)  # fmt: skip
def test_values_of_a_growing_file(
    objective: dict[str, str], text: str, values: list[tuple[int, float]], result: float,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Reading byte by byte gives the same values. An unfinished last line counts once the trial has ended."""
    path = tmp_path / "file"
    aim = parse_space(GOOD | {"objective": objective}).objective
    reader, values_read = Reader(aim, path), []
    for end in range(len(text)):
        path.write_text(text[:end])
        values_read += reader.new()
    values_read += reader.new(ended=True)
    assert values_read == values
    assert reader.result() == (result, "")


def test_a_trial_without_a_value_says_where_none_was(tmp_path: Path) -> None:
    for objective, message in [
        ({"line": r"loss (\S+)"}, r"no value of objective was found by loss (\S+)"),
        ({}, "no value of objective was found by ringdance.report"),
    ]:
        assert (
            Reader(parse_space(GOOD | {"objective": objective}).objective, tmp_path / "file").result()[1]
            == message
        )
    (tmp_path / "file").write_text('{"value": NaN}\n')
    reader = Reader(parse_space(GOOD).objective, tmp_path / "file")
    reader.new()
    assert reader.result()[1] == "objective is nan"


def test_plain_words_are_what_they_look_like(tmp_path: Path) -> None:
    """Words are read as in YAML 1.2, not as in YAML 1.1, which PyYAML implements."""
    text = "1e-4, 1.E+3, .5, 010, -7, 0x1F, 1:2, 2024-01-31, on, no, true, '1e-4', 1_000, 1e, ~"
    choices = space(f"parameters: {{x: [{text}]}}", tmp_path).parameters["x"].options["choices"]
    assert list(map(repr, choices)) == [
        "0.0001", "1000.0", "0.5", "10", "-7", "31", "'1:2'", "'2024-01-31'", "'on'", "'no'", "True",
        "'1e-4'", "'1_000'", "'1e'", "None",
    ]  # fmt: skip


def test_places_are_on_one_host_where_there_is_room() -> None:
    assert places([("a", 2), ("b", 1)], 1) == [[("a", 0)], [("a", 1)], [("b", 0)]]
    assert places([("a", 3), ("b", 3)], 2) == [
        [("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("a", 2), ("b", 2)]
    ]  # fmt: skip
    assert places([("a", 2), ("b", 2)], 4) == [[("a", 0), ("a", 1), ("b", 0), ("b", 1)]]
    with pytest.raises(LaunchError, match="a trial needs 5 slots"):
        places([("a", 2), ("b", 2)], 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.yaml", "--", "true", "{lr}"], "absent.yaml: No such file"),
        (["space.yaml", "--", "nothing-like-it", "{lr}", "{batch}"], "command not found: nothing-like-it"),
        (["space.yaml", "--ranks-per-trial", "0", "--", "true", "{params}"], "0: must be at least 1"),
        (["space.yaml", "--ranks-per-trial", "3", "-H", "h:2", "--", "true", "{params}"], "a trial needs 3"),
        (["show", "absent"], "absent is not a study"),
        (["best", "space.yaml"], "space.search is not a study"),
    ],
)
def test_nothing_is_started_with_a_mistake(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text("parameters: {lr: {low: 0.0, high: 1}, batch: [1, 2]}")
    assert main(["search", *words]) in (2, 127)
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1 or error.startswith("usage: ")
    assert not Path("space.search").exists()
