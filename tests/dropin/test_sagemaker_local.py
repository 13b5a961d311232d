"""Local mode: a script of a SageMaker container trains here, started by SageMaker's own toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdance.errors import ArgumentError, LaunchError
from ringdance.submit.sagemaker import Estimator, Input

SCRIPT = """
import argparse, os, pathlib
import numpy as np
import ringdance.numpy as hvd
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--fail", default="")
options = parser.parse_args()
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
words = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "words.txt").read_text()
print(f"rank {hvd.rank()} of {hvd.size()}: {total[0]} {options.epochs} {words} {os.environ['COLOUR']}")
if options.fail and hvd.rank() == 1:
    raise ValueError("as asked")
if hvd.rank() == 0:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("trained")
"""


@pytest.fixture
def estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, text in (("src/train.py", SCRIPT), ("data/words.txt", "some words")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    def make(**change):
        usual = {
            "source_dir": str(tmp_path / "src"), "instance_type": "local", "processes_per_host": 2,
            "hyperparameters": {"epochs": 3}, "environment": {"COLOUR": "red"},
            "output_path": f"file://{tmp_path}/results",
        }  # fmt: skip
        return Estimator("train.py", **{**usual, **change})

    return make


@pytest.mark.limit(120)
def test_a_script_trains_as_in_a_container(
    estimator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sagemaker_training")
    estimator().fit({"train": f"file://{tmp_path}/data"})
    message = capfd.readouterr()
    for rank in (0, 1):
        assert f"rank {rank} of 2: 3.0 3 some words red" in message.out + message.err
    assert (tmp_path / "results" / "model" / "model.txt").read_text() == "trained"


@pytest.mark.limit(120)
def test_a_failure_is_shown_as_the_toolkit_reports_it(estimator, tmp_path: Path) -> None:
    pytest.importorskip("sagemaker_training")
    with pytest.raises(LaunchError, match=r"(?s)ExecuteUserScriptError.*ExitCode 1"):
        estimator(hyperparameters={"epochs": 1, "fail": "yes"}).fit({"train": str(tmp_path / "data")})


def test_what_local_mode_cannot_do(estimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="pip install sagemaker-training"):
        estimator().fit({})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for change, inputs, message in (
        ({"instance_count": 2}, None, "one host"),
        ({}, {"train": "s3://bucket/data"}, "directories of this machine"),
        ({}, {"train": Input(f"file://{tmp_path}/nothing")}, "does not exist"),
    ):
        with pytest.raises(ArgumentError, match=message):
            estimator(**change).fit(inputs)
