"""What `ringdance bench input` concludes from three speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringdance.tools.bench import cli as bench
from ringdance.tools.bench.cli import INPUT_MARK, Speed, judge, table
from ringdance.training.loaders import input_check


def speed(
    images: float, cores: float = 0.2, second: float = 1.0, noise: float = 0.02, of_second: float = -1.0,
    others: float = 0.0,
) -> Speed:
    """Return the speed of two ranks with two cores each. The second reaches a share of the first one's speed.

    Args:
        images: Images per second of both ranks together if the second were as fast as the first.
        cores: Cores that a rank uses.
        second: Share of the first rank's speed that the second reaches.
        noise: Noise of the measurement.
        of_second: Cores that the second rank uses. By default as many as the first.
        others: Share of the host's cores that other programs use.
    """
    used = [cores, cores if of_second < 0 else of_second]
    rows = [
        {"unit": "images", "samples": images / 2 * share, "seconds": 1.0, "cores": busy_cores, "usable": 2.0,
         "host_busy": sum(used) / 4 + others, "noise": noise, "host": "h", "host_cores": 4}
        for share, busy_cores in zip((1.0, second), used, strict=True)
    ]
    return Speed.of(rows)


@pytest.mark.parametrize(
    ("loader", "step", "both", "bound", "words"),
    [
        (speed(100), speed(400), speed(100), "loader", "75% of the time"),
        (speed(100), speed(400), speed(99), "loader", "4.0 times as fast"),
        (speed(100), speed(400), speed(99), "loader", "waits most of the time (it uses 0.2 of 2.0 cores"),
        (speed(100, cores=1.0), speed(400), speed(99), "loader", "leaves cores idle (it uses 1.0 of 2.0"),
        (speed(100, cores=1.9), speed(400), speed(99), "loader", "--resize 256"),
        (
            speed(100, cores=1.9, second=0.5, of_second=0.1), speed(400), speed(50), "loader",
            "Rank 1 holds the others up: its loader is 33% slower than average, and waits (it uses 0.1 of",
        ),
        (speed(100, cores=1.9, second=0.5), speed(400), speed(50), "loader", "and computes (it uses 1.9"),
        (speed(100, others=0.85), speed(400), speed(99), "unclear", "Other programs use 85% of a host's"),
        (speed(100, cores=0.02, others=0.9), speed(400), speed(99), "loader", "waits most of the time"),
        (speed(100, cores=0.02, others=0.9), speed(400), speed(60), "loader", "waits most of the time"),
        (
            speed(100, second=0.5, of_second=0.02, others=0.8), speed(400), speed(50), "loader",
            "Rank 1 holds the others up: its loader is 33% slower than average, and waits",
        ),
        (speed(100, cores=0.02, others=0.9), speed(400), speed(380), "unclear", "Other programs use"),
        (speed(100, others=0.3), speed(400), speed(99), "loader", "waits most of the time"),
        (speed(400), speed(100), speed(98), "step", "4.0 times as many"),
        (speed(101), speed(100), speed(99), "step", "not the limit"),
        (speed(100), speed(100), speed(51, cores=2.0), "cores", "fewer threads"),
        (speed(100), speed(100), speed(51), "order", "2.0 times as fast"),
        (speed(400), speed(100), speed(80), "order", "prefetch()"),
        (speed(400), speed(100, noise=0.15), speed(80, noise=0.15), "unclear", "less than their noise, 21%"),
        (speed(400), speed(100, noise=0.15), speed(98), "unclear", "Measure longer"),
        (speed(4763), speed(136, noise=0.14), speed(122, noise=0.14), "step", "not the limit"),
        (speed(400), speed(100, noise=0.15), speed(60, noise=0.15), "order", "prefetch()"),
        (speed(85, noise=0.2), speed(100), speed(70), "unclear", "Measure longer"),
    ],
)
def test_who_waits_for_whom(loader: Speed, step: Speed, both: Speed, bound: str, words: str) -> None:
    verdict = judge({"loader": loader, "step": step, "both": both})
    assert verdict.bound == bound
    assert words in f"{verdict.sentence} {verdict.next_step}"


def test_the_job_has_the_pace_of_its_slowest_rank() -> None:
    measured = speed(100, second=0.8)
    assert (measured.samples_per_second, measured.slowest) == (80.0, 1)
    lines = table({"loader": measured, "step": speed(50), "both": speed(50)}).splitlines()
    assert lines[1].split() == ["loader", "alone", "80.0", "2.0%", "0.2", "of", "2.0", "10%"]
    assert lines[3].split() == ["both", "50.0", "2.0%", "0.2", "of", "2.0", "10%"]
    assert len({len(line) for line in lines}) == 1


def test_rows_are_called_rows_and_get_their_own_advice() -> None:
    fast, slow = replace(speed(400), unit="rows"), replace(speed(100, cores=1.9), unit="rows")
    speeds = {"loader": slow, "step": fast, "both": slow}
    assert "rows/s" in table(speeds)
    verdict = judge(speeds)
    assert "the loader alone delivers 100.0 rows/s" in verdict.sentence
    assert "--format rows" in verdict.next_step
    assert "image" not in f"{verdict.sentence} {verdict.next_step}"


def test_unknown_samples_get_no_advice_about_images() -> None:
    fast, slow = replace(speed(400), unit="samples"), replace(speed(100, cores=1.9), unit="samples")
    verdict = judge({"loader": slow, "step": fast, "both": slow})
    assert "compute whatever is the same in every epoch once" in verdict.next_step


def test_the_command_and_the_ranks_know_the_same_mark() -> None:
    assert INPUT_MARK == input_check.INPUT_MARK


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["input"], "the training command is missing"),
        (["input", "--seconds", "0", "--", "true"], "greater than 0"),
        (["inptu", "--", "true"], "did you mean input?"),
        (["input", "-np", "1", "--", "true"], "hvd.watch_input(loader)"),
    ],
)
def test_what_cannot_be_measured(line: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(line) == 2
    assert words in capfd.readouterr().err
