"""``ringdance tune threads``: the order of its trials, what it refuses, and trials of a small command."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringdance.launch.mpi.mpirun import parse
from ringdance.tools.cli import main
from ringdance.tools.tune import Result, Setting, Trials, search

SPACE = {"ranks": [1, 2, 4], "intra": [1, 2, 4], "bind": [0, 1]}
SCRIPT = """
import os, sys, time
threads = int(os.environ["OMP_NUM_THREADS"])
assert os.environ["MKL_NUM_THREADS"] == os.environ["TF_NUM_INTRAOP_THREADS"] == str(threads)
if threads == 3:
    sys.exit("no [three] threads")
if threads == 2:
    sys.exit()
import ringdance.numpy as hvd
hvd.init()
while True:
    time.sleep(0.02)
    hvd.mark_step()
"""


def speed(one: Setting) -> Result:
    """Stand in for a command that is fastest with two ranks of one thread each, and fails if bound."""
    if one.bind:
        return 0.0, "exit code 1"
    return 10.0 - abs(one.ranks - 2) - abs(one.intra - 1), ""


def test_one_field_after_the_other_finds_the_best() -> None:
    best, results = search(SPACE, 4, speed)
    assert best == Setting(2, 1, 0)
    tried = list(results)
    assert tried[:3] == [(4, 1, 0), (2, 2, 0), (1, 4, 0)]  # each rank with its share of the cores
    assert len(tried) == 3 + 2 + 1
    assert [len(results[setting]) for setting in tried] == [6, 11, 1, 6, 1, 1]


def test_a_command_is_tried_and_the_line_to_use_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rate.py").write_text(SCRIPT)
    own = [sys.executable, str(tmp_path / "rate.py"), "{batch}"]
    options = ["--global-batch", "7", "--ranks", "1,2", "--intra", "2,3,4", "--bind", "off"]
    line = ["tune", "threads", *options, "--seconds", "0.5", "--", *own]
    start = time.monotonic()
    assert main(line) == 0
    assert time.monotonic() - start < 300  # trial 4 was stopped
    out, err = capfd.readouterr()
    assert "Skipping [2] ranks per host: 7 cannot be divided among them." in err
    no_number, failed = [text for text in out.splitlines() if text.startswith("failed: ")]
    assert "intra-op 2" in no_number
    assert "no steps counted" in no_number
    assert "intra-op 3" in failed
    assert "exit code 1: first failure: rank 0" in failed
    assert "no [three] threads" in failed
    last = out.splitlines()[-1]
    assert "-x OMP_NUM_THREADS=4" in last
    assert last.startswith("ringdance run -np 1 ")
    assert last.endswith("rate.py 7")
    own_words = [word.replace("{batch}", "7") for word in own[1:]]
    left = subprocess.run(["pgrep", "-f", " ".join(own_words)], capture_output=True, text=True).stdout.split()
    assert [process_id for process_id in left if int(process_id) != os.getpid()] == []


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
def test_noise_is_not_recommended(noise: float) -> None:
    """Two threads change nothing, and are not recommended. One rank is twice as slow, which is detected."""
    recommended = []
    for seed in range(200):
        luck = random.Random(seed)

        def run(one: Setting, luck: random.Random = luck) -> Result:
            level = 0.5 if luck.random() < noise else 1.0  # another program
            return level * luck.lognormvariate(0, noise) * (1 + (one.ranks > 1)), ""

        recommended.append(search(SPACE | {"ranks": [1, 2]}, 2, run)[0])
    assert sum(setting != (2, 1, 0) for setting in recommended) <= 8


def test_turns_are_fair() -> None:
    """A program that runs for half of the time must not always meet the same setting."""
    for half in (1, 2, 3, 4):
        for phase in range(2 * half):
            slow = [(0.5 if (n + phase) // half % 2 else 1.0) for n in range(1000)]
            assert search({"ranks": [1], "intra": [1, 2], "bind": [0]}, 1,
                          lambda one, slow=slow: (slow.pop(), ""))[0] == (1, 1, 0)  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])  # SIGHUP: the terminal is closed
def test_no_trial_outlives_the_command(number: int, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "wait.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(f'{{os.getpid()}}.')\ntime.sleep(300)"
    )
    line = [sys.executable, "-m", "ringdance", "tune", "threads", "--", sys.executable]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # otherwise nohup's handler would stay
    command = subprocess.Popen([*line, str(tmp_path / "wait.py")], env=os.environ | {"TMPDIR": str(tmp_path)})
    signal.signal(signal.SIGHUP, before)
    end = time.monotonic() + 120
    while not (pid.exists() and pid.read_text().endswith(".")):
        assert time.monotonic() < end
        time.sleep(0.1)
    command.send_signal(number)
    assert command.wait(60) == (130 if number == signal.SIGHUP else -number)
    rank = int(pid.read_text()[:-1])
    while Path(f"/proc/{rank}").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert number == signal.SIGKILL or not list(tmp_path.glob("ringdance-*"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-- true {batch}", "Add --global-batch N"),
        ("--global-batch 8 -- true", "Add {batch} in the command"),
        ("--global-batch 8 --ranks 3 -- true {batch}", "ranks per host, hosts: 1. Use --global-batch 9"),
        ("--ranks 1,2 -- true", "the total batch size would change"),
        ("--intra 0,2 -- true", "'0,2' is not a list of positive integers"),
        ("--seconds 0 -- true", "0: must be a finite number greater than 0"),
        ("-- no-such-program", "no-such-program"),
        ("", "COMMAND"),
    ],
)
def test_what_is_wrong_is_refused(line: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "threads", *line.split()]) in (2, 127)
    assert why in capsys.readouterr().err


def test_a_bound_rank_gets_all_of_its_cores() -> None:
    """Check the command line that mpiexec gets. Hosts are named as `ringdance mpirun` reads them."""
    ssh = dict.fromkeys(("ssh_port", "ssh_identity_file", "python", "ssh_args"))
    options = argparse.Namespace(global_batch=64, command=["train", "{batch}"], **ssh)
    trials = Trials(options, [("fe80::1", 8), ("h2", 8)], 8)
    kind, *words = trials.line(Setting(2, 4, 1))
    line = parse(words, {})
    assert (kind, line.ranks, line.hosts) == ("mpirun", 4, [("fe80::1", 2), ("h2", 2)])
    assert line.mpi == ["--use-hwthread-cpus", "--bind-to", "hwthread", "--map-by", "slot:PE=4"]
    assert (line.notes, line.command) == ([], ["train", "16"])
