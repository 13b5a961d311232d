"""Tables, curves and advice for training strategies that are compared with each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "strategies"))

import strategies
from comparison import Result, advice, curves, table


def result(strategy: str, speed: float, auc: float = 0.8, busy: float = 2.0, **more: object) -> Result:
    """Return a result with two points: half of the AUC's gain after 1,000 rows, and all of it after 2,000."""
    points = [[rows, rows / speed, 0.5 + (auc - 0.5) * rows / 2000, 0.4] for rows in (1000, 2000)]
    more = {"validation": 30_000, **more}
    return Result(
        "torch", strategy, {"cores": 2}, processes=2, cores_busy=busy, memory=10**9, curve=points, **more
    )  # type: ignore[arg-type]


def test_the_fastest_of_equal_auc_is_recommended():
    text = advice([
        result("single", 500), result("ringdance", 900, 0.7985), result("parameter_server", 1800, 0.77)
    ])  # fmt: skip
    assert text.startswith("PyTorch: use ringdance: 900 samples/s")
    assert "- parameter_server: 2.00 times faster; its AUC after the same rows is lower by 0.0285" in text
    assert "- single: 1.80 times slower" in text
    assert "One process is nearly as fast" not in text


def test_nothing_is_recommended_of_one_strategy_or_beside_other_programs():
    assert advice([result("single", 500)]).startswith("PyTorch: single: 500 samples/s")
    text = advice([result("single", 500), result("ringdance", 900, others=0.7)])
    assert text.startswith("PyTorch: other programs used up to 0.7 of 2 cores meanwhile")
    assert "use" not in text.replace("used", "")


def test_few_rows_and_short_runs_say_little():
    few = [result("single", 500, 0.52, validation=40), result("ringdance", 900, 0.49, validation=40)]
    text = advice(few)
    assert text.startswith("PyTorch: use ringdance")  # because of its speed; the AUC differs by chance
    assert "Of 40 rows for validation, differences of AUC below 0.055 are chance" in text
    assert "Trained for 2.2 s: too short" in text
    long = advice([result("single", 100), result("ringdance", 120)])
    assert "chance" not in long
    assert "too short" not in long


def test_reasons_follow_from_cores_and_work():
    best = result("ringdance", 1000, busy=2.0)
    idle, busy = result("single", 500, busy=1.0), result("ddp", 500, busy=2.0)
    lines = {line.split(":")[0].strip("- "): line for line in advice([best, idle, busy]).splitlines() if line}
    assert "cores idle (1.0 busy against 2.0)" in lines["single"]
    assert "CPU time" not in lines["single"]
    assert "2.00 times the CPU time" in lines["ddp"]
    assert "idle" not in lines["ddp"]
    assert "about as fast" in advice([best, result("ddp", 950)])
    assert "One process is nearly as fast" in advice([best, result("single", 950)])


def test_auc_is_compared_where_all_were_evaluated():
    """A run stopped by its time limit is evaluated at that point too, where the others were not evaluated."""
    short, long = result("single", 500), result("ringdance", 1000)
    short.curve[1] = [1500, 3.0, 0.7, 0.4]
    long.curve = [[1000, 1.0, 0.65, 0.4], [2000, 2.0, 0.8, 0.4], [3000, 3.0, 0.81, 0.4]]
    text = table([short, long, Result("torch", "ddp", error="Error: no | network")])
    heads, _, first, second, failed = text.splitlines()
    assert "AUC after 1,000 rows | AUC after 3 s" in heads
    assert [cell.strip() for cell in first.split("|")][7:9] == ["0.6500", "0.8100"]
    assert [cell.strip() for cell in second.split("|")][7:9] == ["0.6500", "0.7000"]
    assert failed.count("|") == heads.count("|")
    assert "no / network" in failed


def test_failures_alone_are_reported_too(tmp_path: Path):
    failed = [Result("tensorflow", "mirrored", error="Error: none")]
    assert "TensorFlow mirrored failed: Error: none" in advice(failed)
    assert "failed" in table(failed)
    curves(failed, tmp_path / "curves.svg")
    assert not (tmp_path / "curves.svg").exists()


def test_curves_are_a_picture_with_all_strategies(tmp_path: Path):
    file = tmp_path / "curves.svg"
    curves([result("single", 500), result("ringdance", 1000)], file)
    words = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("single") == words.count("ringdance") == 2
    titles = {f"PyTorch, by {word}, AUC on the validation part" for word in ("rows", "time")}
    assert {*titles, "thousand rows", "seconds of training"} <= {*words}


def test_auc_counts_ties_by_half():
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 9, 500) / 9, (random.random(500) < 0.3).astype(np.float32)
    assert strategies.auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert np.isnan(strategies.auc(scores, np.zeros(500)))


def test_first_values_are_equal_everywhere():
    sizes = strategies.Sizes(table_size=50, fields=3, dim=2, hidden=(4,))
    first, other = sizes.first_values(), sizes.first_values()
    assert {name: value.shape for name, value in first.items()} == {
        "table": (50, 3), "bias": (1,), "w0": (6, 4), "b0": (4,), "w1": (4, 1), "b1": (1,)
    }  # fmt: skip
    assert all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("step_s", [0.001, 0.3, 2.0, 40.0])
def test_the_time_for_training_is_kept(step_s: float) -> None:
    """Steps of any length: training stops after the step that ends closest to the limit."""
    steps, look, looks = 0, 1, 0
    while look:
        steps, looks = steps + look, looks + 1
        look = strategies.steps_until_look(steps, steps * step_s, 30.0)
    assert abs(steps * step_s - 30.0) <= max(step_s / 2 + 1e-9, step_s - 30.0)
    assert looks <= 40  # each look is an exchange


@pytest.mark.parametrize("kind", ["Slow", "Later"])
def test_slow_steps_end_with_the_time(kind: str) -> None:
    """A slow step is not followed by seven more, nor are too many steps started without waiting."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, kind], capture_output=True, text=True, check=True, timeout=50,
        cwd=Path(strategies.__file__).parent,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "2"


TRAIN = """
import argparse, sys, time
import strategies
class Slow(strategies.Strategy):
    steps = 0
    def __init__(self): pass
    def step(self):
        self.steps += 1
        time.sleep(0.4 * (self.steps > 3))  # the first three are the warm-up
        return 10
class Later(Slow):
    waiting = 0
    def step(self):
        self.steps += 1
        self.waiting += self.steps > 3
        return 10
    def finish(self):
        time.sleep(0.4 * self.waiting)
        self.waiting = 0
slow = {"Slow": Slow, "Later": Later}[sys.argv[1]]()
place = strategies.Place(1, 2, [], [], argparse.Namespace(rows=1000, seconds=0.7, data="", batch_size=10))
strategies.train(slow, place)
print(slow.steps - 3)
"""
