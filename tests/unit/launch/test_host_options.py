"""All commands that take hosts have the same options, and reach the hosts as these options say."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from ringdance.host.schedulers.hostfile import hosts_text, parse_hosts
from ringdance.launch import mpirun_cli
from ringdance.launch.mpi.mpirun import parse
from ringdance.launch.remote.shell import add_host_options, ssh_words
from ringdance.launch.spec import JobSpec
from ringdance.tools import tune
from ringdance.tools.bench import cli as bench
from ringdance.tools.bench import train as bench_train
from ringdance.tools.cli import main

COMMANDS = (
    "run", "bench train", "bench input", "tune threads", "search", "doctor", "explain", "hosts copy",
)  # fmt: skip
HOW = ["--ssh-port=2222", "--ssh-identity-file=/k", "--python=/opt/bin/python", "--ssh-args=-o User=me"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_all_of_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    long = [option.split("=")[0] for option in HOW]
    for option in ("-H", "--hosts", "--hostfile", "-p", "-i", *long):
        assert re.search(rf"(^|\s){option}\b", shown), option


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("h1 slots=4\nfe80::1 slots=4\n")
    return str(tmp_path / "hosts")


def test_hosts_as_text_are_read_again() -> None:
    hosts = [("h1", 4), ("fe80::1", 2)]
    assert hosts_text(hosts) == "h1:4,[fe80::1]:2"
    assert parse_hosts(hosts_text(hosts)) == hosts


def test_the_words_for_a_launcher_are_what_was_given() -> None:
    parser = argparse.ArgumentParser()
    add_host_options(parser)
    assert ssh_words(parser.parse_args(["-H", "h1"])) == []
    assert ssh_words(parser.parse_args(HOW)) == HOW


def test_bench_input_hands_them_to_its_runs(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measure(part: str, words: list[str], seconds: float) -> None:
        seen.extend(words)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", measure)
    assert main(["bench", "input", "--hostfile", hostfile, *HOW, "--", "python", "train.py"]) == 130
    assert seen == ["-H", "h1:4,[fe80::1]:4", *HOW, "--", "python", "train.py"]


def test_bench_train_starts_its_ranks_there(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[JobSpec] = []

    def prepare(spec: JobSpec) -> None:
        seen.append(spec)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_train, "prepare", prepare)
    assert main(["bench", "train", "--model", "mlp", "--np", "8", "--hostfile", hostfile, *HOW]) == 130
    (spec,) = seen
    assert (spec.ranks, spec.hosts) == (8, [("h1", 4), ("fe80::1", 4)])
    assert (spec.shell.port, spec.shell.identity, spec.shell.python) == (2222, "/k", "/opt/bin/python")
    assert list(spec.shell.arguments) == ["-o", "User=me"]


@pytest.mark.parametrize("bind", ["off", "on"])
def test_tune_threads_starts_its_trials_there(
    bind: str, hostfile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def run(trials: tune.Trials, one: tune.Setting, directory: Path) -> tune.Result:
        lines.append(trials.line(one))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.Trials, "run", run)
    assert main(["tune", "threads", "--hostfile", hostfile, "--bind", bind, *HOW, "--", "true"]) == 130
    kind, *words = lines[0]
    assert words[:8] == ["-np", "2", "-H", "h1:1,[fe80::1]:1", *HOW]
    if kind == "mpirun":  # which also accepts these options
        line = parse(words, {})
        assert line.ssh == ["-o", "User=me"]
        assert [option for option in HOW[:3] if option not in line.options] == []
        assert mpirun_cli.cli.parser().parse_args([*line.options, "true"]).ssh_port == 2222
