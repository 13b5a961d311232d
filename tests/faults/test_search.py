"""`ringdance search` while its searcher and its trials are killed, and what remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import here_hosts
import psutil
import pytest
from doc_blocks import ROOT, blocks, environment, put_files
from processes import wait_until

from ringdance.tools.cli import main
from ringdance.tools.search.searcher import MARK
from ringdance.tools.search.study import Study

pytest.importorskip("optuna")
SPACE = """\
parameters:
  x: {low: -5.0, high: 10.0}
  lr: {low: 1e-3, high: 1, log: true}
objective: {name: loss, line: 'loss (\\S+)'}
sampler: {name: random, seed: 3}
trials: %d
"""
# Reports its start and end. The first two trials have a child that outlives them if it can.
SCRIPT = """\
import os, subprocess, sys, time
x, number, seconds = float(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def say(word):
    with open("said", "a") as file:
        file.write(f"{word} {number} {os.getpid()}\\n")
say("begin")
assert os.environ["SLOT"] in ("0", "1")
if int(number) < 2:
    subprocess.Popen(["sleep", "60"], start_new_session=True)
time.sleep(seconds)
print("loss", x * x + float(os.environ["LR"]))
say("end")
"""


@pytest.fixture(autouse=True)
def _this_python_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this Python first in PATH: trials run `python`, which a machine may not have."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


class Search:
    """Searches in one directory, one after another."""

    def __init__(self, directory: Path, trials: int, seconds: float) -> None:
        self.directory = directory
        (directory / "space.yaml").write_text(SPACE % trials)
        (directory / "trial.py").write_text(SCRIPT)
        self.command = [
            "env",
            "LR={lr}",
            "SLOT={slots}",
            "python",
            "trial.py",
            "{x}",
            "{trial}",
            str(seconds),
        ]

    def start(self, *options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "ringdance", "search", "space.yaml", "-H", "localhost:2", *options]
        return subprocess.Popen(
            [*words, "--", *self.command], cwd=self.directory, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def said(self, word: str) -> list[tuple[int, int]]:
        """Return numbers and pids of the trials that wrote this word."""
        path = self.directory / "said"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[1]), int(line.split()[2])) for line in lines if line.startswith(word)]

    def wait_for(self, word: str, count: int) -> None:
        assert wait_until(lambda: len(self.said(word)) >= count, 60) is not None

    def processes(self) -> list[str]:
        study = str((self.directory / "space.search").resolve())
        results = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK, "").startswith(study) and process.status() != "zombie":
                    results.append(f"{process.pid}: {process.cmdline()}")
            except psutil.Error:
                continue
        return results


def killed_and_resumed(directory: Path, trials: int, kills: int, seconds: float) -> None:
    search = Search(directory, trials, seconds)
    for kill in range(kills):
        running = search.start()
        search.wait_for("begin", 2 + kill * trials // (kills + 1))
        if kill == 0:
            _, pid = search.said("begin")[0]
            os.kill(pid, signal.SIGKILL)
            search.wait_for("begin", 3)
        running.kill()
        running.communicate()
    running = search.start()
    out, _ = running.communicate(timeout=240)
    assert running.returncode == 0, out
    study = Study(directory / "space.search")
    assert [(trial.number, trial.state.name) for trial in study.trials()] == [
        (number, "COMPLETE") for number in range(trials)
    ], out
    assert len({trial.params["x"] for trial in study.trials()}) == trials
    ends = Counter(number for number, _ in search.said("end"))
    assert set(ends) == set(range(trials))
    # A trial may complete while its searcher is being killed, unseen until its code is written.
    assert sum(ends.values()) - trials <= kills
    begins = Counter(number for number, _ in search.said("begin"))
    assert sum(begins.values()) <= trials + 1 + 2 * kills
    assert {"0000.1", "0001.1"} & {path.name for path in (directory / "space.search/failed").iterdir()}
    assert not search.processes()


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, trials=6, kills=1, seconds=0.3)


@pytest.mark.slow
def test_forty_trials_of_which_none_is_lost_or_doubled(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, trials=40, kills=2, seconds=0.5)


def test_a_trial_that_ends_without_its_searcher_is_not_run_again(tmp_path: Path) -> None:
    search = Search(tmp_path, 2, 1.0)
    running = search.start()
    search.wait_for("begin", 2)
    running.kill()
    running.communicate()
    search.wait_for("end", 2)
    time.sleep(0.3)
    out, _ = search.start().communicate(timeout=60)
    assert "2 trials: 2 finished" in out
    assert len(search.said("begin")) == 2
    assert not search.processes()


def test_ctrl_c_leaves_no_process_and_the_search_goes_on(tmp_path: Path) -> None:
    search = Search(tmp_path, 3, 1.0)
    running = search.start()
    search.wait_for("begin", 2)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 130, out
    assert "to continue the search" in out
    assert not search.processes()
    assert not search.said("end")
    out, _ = search.start().communicate(timeout=60)
    assert "3 trials: 3 finished" in out
    assert "env LR=" in out


def test_failed_trials_are_kept_apart_and_end_the_search(tmp_path: Path) -> None:
    search = Search(tmp_path, 30, 0.0)
    (tmp_path / "trial.py").write_text("import sys\nprint('no metric')\nsys.exit(int(sys.argv[2]) % 2)\n")
    running = search.start()
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "exit code 1 (space.search/failed/0001.1/log)" in out
    assert "no value of loss was found by loss (\\S+) (space.search/failed/0000.1/log)" in out
    assert "The search stops, because too many trials have failed" in out
    assert (tmp_path / "space.search/failed/0001.1/log").read_text() == "no metric\n"
    assert not list((tmp_path / "space.search/trials").iterdir())


def test_a_pruned_trial_ends_at_its_next_report_or_is_ended(tmp_path: Path) -> None:
    """In trials of two ranks, rank 0 of odd trials ignores pruning and must be terminated."""
    (tmp_path / "space.yaml").write_text(
        "parameters: {x: {low: 0.0, high: 1.0}}\nsampler: {name: random, seed: 0}\ntrials: 4\n"
        "pruner: {name: median, n_startup_trials: 1}\n"
    )
    (tmp_path / "trial.py").write_text(
        "import sys, time, ringdance\nnumber = int(sys.argv[2])\n"
        "for step in range(4 if number == 0 else 400):\n"
        "    try:\n        ringdance.report(number, step)\n"
        "    except SystemExit:\n        if number % 2 == 0: raise\n"
        "    time.sleep(0.1)\n"
    )
    words = ["search", "space.yaml", "-H", "localhost:2", "--ranks-per-trial", "2", "--grace", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *words, "--", "python", "trial.py", "{x}", "{trial}"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert "trial 0: objective 0" in done.stdout, done.stdout + done.stderr
    assert "4 trials: 1 finished, 3 pruned; best objective 0, trial 0" in done.stdout
    assert "ringdance run -np 2 python trial.py" in done.stdout
    assert "this trial has been pruned" in (tmp_path / "space.search/trials/0002/log").read_text()


EARLY = """\
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if sys.argv[2] == "0" else None)
print("loss -9", flush=True)
with open("said", "a") as file:
    file.write(f"begin {sys.argv[2]} 0\\n")
while not Path("go").exists():
    time.sleep(0.05)
print("loss 1")
"""


@pytest.mark.parametrize("to", ["searcher", "trial"])
def test_a_trial_that_a_signal_ends_well_has_no_result(to: str, tmp_path: Path) -> None:
    """Trial 0 saves and exits with 0, trial 1 continues, and the searcher is killed before it finishes."""
    search = Search(tmp_path, 2, 0.0)
    (tmp_path / "trial.py").write_text(EARLY)
    running = search.start()
    search.wait_for("begin", 2)
    exits = tmp_path / "space.search/trials/0000/exit"
    if to == "trial":  # as a scheduler signals all processes
        running.send_signal(signal.SIGSTOP)
        shells = [child for child in psutil.Process(running.pid).children() if str(exits) in child.cmdline()]
        os.killpg(shells[0].pid, signal.SIGTERM)
    else:
        running.send_signal(signal.SIGTERM)
    assert wait_until(exits.exists, 20) is not None
    assert exits.read_text() == "143\n"
    running.kill()
    running.communicate()
    again = search.start("--grace", "1")
    search.wait_for("begin", 4)
    (tmp_path / "go").touch()
    out, _ = again.communicate(timeout=60)
    assert "2 trials: 2 finished; best loss 1," in out, out
    assert not search.processes()


def test_a_copied_study_leaves_the_trials_of_the_first_alone(tmp_path: Path) -> None:
    """An exit code file left empty by a host that went down does not count as an exit code."""
    search = Search(tmp_path, 1, 0.0)
    (tmp_path / "trial.py").write_text(EARLY)
    running = search.start()
    search.wait_for("begin", 1)
    shutil.copytree(tmp_path / "space.search", tmp_path / "copy")
    (tmp_path / "copy/trials/0000/exit").touch()
    copy = search.start("--study", "copy", "--grace", "1")
    search.wait_for("begin", 2)
    (tmp_path / "go").touch()
    for item in (copy, running):
        out, _ = item.communicate(timeout=60)
        assert "1 trial: 1 finished; best loss 1," in out, out
    assert len(search.said("begin")) == 2


def test_what_is_no_failure_or_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Diverging trials do not end the search, brackets are not markup, and code 255 is not a signal."""
    search = Search(tmp_path, 8, 0.0)
    (tmp_path / "trial.py").write_text(
        "import sys\nn = int(sys.argv[2])\n"
        "print('loss' if n else '', 'nan' if n < 6 else n)\nsys.exit(-(n == 6))"
    )
    (tmp_path / "space.yaml").write_text((SPACE % 8).replace("(\\S+)", "(\\S+)|[/a]$"))
    out, _ = search.start().communicate(timeout=60)
    assert "8 trials: 1 finished, 7 failed; best loss 7, trial 7" in out, out
    assert main(["search", "show", str(tmp_path / "space.search")]) == 0
    shown = capsys.readouterr().out
    assert "trial 0 failed: no value of loss was found by loss (\\S+)|[/a]$" in shown
    assert "trial 6 failed: exit code 255" in shown
    assert "trial 5 failed: loss is nan" in shown


@pytest.mark.slow
def test_the_digits_of_the_page_are_tuned(tmp_path: Path) -> None:
    """The commands of docs/howto/training/search.md work as shown."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    page = ROOT / "docs" / "howto" / "training" / "search.md"
    put_files(page, tmp_path)
    for block in blocks(page):
        if "test_search.py" in block.marks.get("in", ""):
            for command, _ in block.commands():
                done = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL,
                    capture_output=True, text=True, timeout=1800,
                )  # fmt: skip
                assert done.returncode == 0, done.stdout + done.stderr
    best = Study(tmp_path / "digits.search").best()
    assert best is not None
    assert best.value is not None
    assert best.value > 95


@pytest.mark.skipif(bool(here_hosts.why_not()), reason=here_hosts.why_not() or "-")
@pytest.mark.limit(180)
def test_trials_on_two_hosts(tmp_path: Path) -> None:
    """Each trial has a rank on both hosts, and a signal terminates both."""
    (tmp_path / "space.yaml").write_text("parameters: {x: {low: 0.0, high: 1.0}}\ntrials: 2\n")
    (tmp_path / "trial.py").write_text(
        "import os, sys, time\nimport numpy as np\nimport ringdance, ringdance.numpy as hvd\nhvd.init()\n"
        "for step in range(int(os.environ['STEPS'])):\n    time.sleep(0.1)\n"
        "    ringdance.report(hvd.allreduce(np.ones(1), name='a', op=hvd.Sum)[0], step)\n"
    )
    words = [sys.executable, "-m", "ringdance", "search", "space.yaml", "-H", "localhost:1,other1:1"]
    words += ["--ranks-per-trial", "2", "--", "python", str(tmp_path / "trial.py"), "{x}"]
    environ = here_hosts.environment(tmp_path / "bin")

    def search(steps: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=tmp_path, env={**environ, "STEPS": str(steps)}, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    running, reports = search(1000), tmp_path / "space.search/trials/0000/report.jsonl"
    assert wait_until(reports.exists, 50) is not None, running.communicate()
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 130
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    assert not [line for line in lines if str(tmp_path / "trial.py") in line]
    out, _ = search(3).communicate(timeout=60)
    assert "2 trials: 2 finished; best objective 2" in out, out
