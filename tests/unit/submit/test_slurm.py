"""Batch files for Slurm: read again by bash, and by what sbatch makes of its lines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ringdance import cli
from ringdance.errors import LaunchError
from ringdance.submit.slurm import BatchJob

JOB = BatchJob(
    command=["python", "train.py", "--note", "it's $HOME; true"], nodes=4, cpus_per_rank=6, gpus=8,
    time="1-12:00:00", partition="gpu", account="vision", memory="200G",
    setup=["export COLOUR=red"], env=["COLOUR"],
    sbatch=["exclusive", "--comment=two words"],
)  # fmt: skip


def test_what_is_asked_for() -> None:
    options = [line for line in JOB.text().splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "#SBATCH --job-name=train", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=6", "#SBATCH --gpus-per-node=8", "#SBATCH --time=1-12:00:00",
        "#SBATCH --partition=gpu", "#SBATCH --account=vision", "#SBATCH --mem=200G",
        "#SBATCH --output=%x-%j.log", "#SBATCH --exclusive", '#SBATCH "--comment=two words"',
    ]  # fmt: skip
    assert JOB.text().startswith("#!/bin/bash\n#SBATCH")


def test_values_are_quoted_as_sbatch_reads_them() -> None:
    """sbatch 22.05 gave the job that name and that comment."""
    text = BatchJob(name='a "b" \'c\' \\ #d $e', sbatch=["--comment=x#y"], command=["true"]).text()
    assert '#SBATCH "--job-name=a \\"b\\" \'c\' \\\\ #d $e"\n' in text
    assert '#SBATCH "--comment=x#y"\n' in text


def test_bash_calls_the_launcher_with_the_very_words(tmp_path: Path) -> None:
    program = tmp_path / "ringdance"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$COLOUR" "$@"\n')
    program.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash"], input=JOB.text(), env=environ, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == ["red", "run", "-np", "32", "-x", "COLOUR", "--", *JOB.command]


def test_ranks_are_the_gpus_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["slurm", "script", "--nodes", "2", "--gpus", "4", "--", "python", "t.py"]) == 0
    assert "-np 8 -- python t.py" in capsys.readouterr().out
    assert cli.main(["slurm", "script", "--gpus", "4", "--ranks-per-node", "2", "--", "python", "t.py"]) == 0
    assert "-np 2 -- python t.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{"command": []}, {"nodes": 0}, {"ranks_per_node": 0}, {"cpus_per_rank": 0}, {"gpus": -1},
     {"time": "soon"}, {"name": "a\n#SBATCH --nodes=99"}, {"env": ["A=1"]}],
)  # fmt: skip
def test_mistakes(change: dict[str, Any]) -> None:
    with pytest.raises(LaunchError):
        BatchJob(**{"command": ["true"], **change}).text()
