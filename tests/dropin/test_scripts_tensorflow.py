"""TensorFlow and Keras scripts as users write them for Horovod, run alone, by horovodrun and by mpiexec.

By horovodrun, the scripts run in conftest.py's job. In make test-all, each script also runs as its own job.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_blocks import blocks
from script_jobs import LIMIT, ROOT, SCRIPTS, Outcome, Task, run_all, run_each

pytestmark = [
    pytest.mark.limit(4 * LIMIT),
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow"),
]
every_way = pytest.mark.parametrize(
    ("way", "size"),
    [
        ("horovodrun", 2),
        pytest.param("alone", 1, marks=pytest.mark.slow),
        pytest.param("mpiexec", 3, marks=pytest.mark.slow),
        pytest.param("each by mpiexec", 3, marks=pytest.mark.slow),
    ],
)
# Scripts with sessions turn eager execution off. The last one is in docs/coming-from-horovod.md.
NAMES = ("tensorflow_tape", "tensorflow_session", "session")
PAGE = ROOT / "docs" / "coming-from-horovod.md"
Start = Callable[[str, int, str], Outcome]


def on_two_ranks(above: Path) -> dict[str, Task]:
    """Create the directories of the scripts, and the page's script."""
    (above / "session.py").write_text(next(item.text for item in blocks(PAGE) if item.file == "session.py"))
    places = {name: SCRIPTS for name in NAMES[:-1]} | {NAMES[-1]: above}
    for name in NAMES:
        (above / name).mkdir()
    return {name: Task(str(place / f"{name}.py"), (), above / name) for name, place in places.items()}


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return the outcome of one script. The first request runs all of them."""

    @functools.cache
    def outcomes(way: str, size: int) -> dict[str, Outcome]:
        if (way, size) == ("horovodrun", 2):
            return request.getfixturevalue("shared_job")
        return run_all(way, size, on_two_ranks(tmp_path_factory.mktemp(way.replace(" ", "-"))))

    def start(way: str, size: int, name: str) -> Outcome:
        outcome = outcomes(way, size)[name]
        assert outcome.code == 0, outcome.out + outcome.err
        return outcome

    return start


@every_way
def test_a_loop_with_a_tape(start: Start, way: str, size: int) -> None:
    done = start(way, size, "tensorflow_tape")
    assert len(set(done.of_ranks(r"weights [\d.]+"))) == 1
    assert done.one(r"last loss: ([\d.]+)") < 1.0
    assert len(re.findall(r"Step #\d+", done.out)) == -(-(240 // size) // 20)
    assert any(path.name.startswith("model") for path in (done.directory / "checkpoints").iterdir())


@every_way
def test_a_session_with_the_hook(start: Start, way: str, size: int) -> None:
    done = start(way, size, "tensorflow_session")
    (mean,) = set(done.of_ranks(r"mean loss [\d.e-]+"))
    assert float(mean.split()[-1]) < 0.5
    assert any(path.name.startswith("model.ckpt") for path in (done.directory / "checkpoints").iterdir())


@every_way
def test_the_session_of_the_page(start: Start, way: str, size: int) -> None:
    block = next(item for item in blocks(PAGE) if item.language == "console" and "session.py" in item.text)
    _, _, shown = block.text.splitlines()[1].partition(":")
    assert start(way, size, "session").out.splitlines() == [shown] * size


@pytest.mark.slow
def test_keras_by_horovodrun(tmp_path: Path) -> None:
    """Keras's rank tests also run this script, within their own processes (test_keras_scripts.py)."""
    pytest.importorskip("sklearn")
    words = [str(SCRIPTS / "keras_mnist.py"), "--directory", str(tmp_path)]
    done = run_each("horovodrun", 2, words, tmp_path)
    assert done.code == 0, done.out + done.err
    assert "equal: True" in done.out
    assert (tmp_path / "checkpoint-6.keras").exists()
