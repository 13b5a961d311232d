"""A search as a Katib Experiment: its trial is a right MPIJob, and Katib's own models know all its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_schemas import problems

from ringdance.cli import main

pytest.importorskip("optuna")
SPACE = """\
parameters:
  lr: {low: 0.0001, high: 0.1, log: true}
  batch: {low: 16, high: 64, step: 16}
  optimizer: [sgd, adam]
  nesterov: [true, false]
objective: {name: accuracy, goal: maximize, line: 'test accuracy: ([0-9.]+)', take: best}
trials: 12
sampler: {name: tpe, seed: 3}
pruner: {name: median, n_startup_trials: 4, n_warmup_steps: 2}
"""
OPTIONS = "--image registry/train:1 --name digits --workers 2 --slots 4 --parallel 3 --volume pvc:d:/d"
COMMAND = [
    "env", "BATCH={batch}", "python", "train.py", "--lr", "{lr}", "--optimizer={optimizer}", "{nesterov}",
    "--out", "/data/{trial}",
]  # fmt: skip


def written(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    text: str = SPACE,
    command: list[str] = COMMAND,
    options: str = OPTIONS,
) -> dict[str, Any]:
    (directory / "space.yaml").write_text(text)
    words = ["k8s", "manifest", "--katib", str(directory / "space.yaml"), *options.split()]
    code = main([*words, "--", *command])
    out, error = capsys.readouterr()
    assert code == 0, error
    return yaml.safe_load(out)


def test_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = written(tmp_path, capsys)
    assert document["metadata"]["name"] == "digits"
    spec = document["spec"]
    assert spec["parameters"] == [
        {"name": "lr", "parameterType": "double",
         "feasibleSpace": {"min": "0.0001", "max": "0.1", "distribution": "logUniform"}},
        {"name": "batch", "parameterType": "int", "feasibleSpace": {"min": "16", "max": "64", "step": "16"}},
        {"name": "optimizer", "parameterType": "categorical", "feasibleSpace": {"list": ["sgd", "adam"]}},
        {"name": "nesterov", "parameterType": "categorical", "feasibleSpace": {"list": ["true", "false"]}},
    ]  # fmt: skip
    assert spec["objective"]["metricStrategies"] == [{"name": "test accuracy:", "value": "max"}]
    pattern = spec["metricsCollectorSpec"]["source"]["filter"]["metricsFormat"]
    assert pattern == [r"(test accuracy:)\s*([0-9.]+)"]
    assert [spec[f"{name}TrialCount"] for name in ("max", "parallel", "maxFailed")] == [12, 3, 5]
    assert spec["algorithm"]["algorithmSettings"] == [{"name": "random_state", "value": "3"}]
    assert spec["earlyStopping"]["algorithmName"] == "medianstop"
    template = spec["trialTemplate"]
    assert problems(template["trialSpec"]) == []
    replicas = template["trialSpec"]["spec"]["mpiReplicaSpecs"]
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["name"] == template["primaryContainerName"]
    assert launcher["command"][-4:] == [
        "--optimizer=${trialParameters.optimizer}", "${trialParameters.nesterov}",
        "--out", "/data/${trialParameters.trial}",
    ]  # fmt: skip
    assert "BATCH=${trialParameters.batch}" in launcher["command"]
    # Katib refuses parameters of a trial that are not in it.
    for one in template["trialParameters"]:
        assert f"${{trialParameters.{one['name']}}}" in json.dumps(template["trialSpec"])
    assert {"name": "trial", "reference": "${trialSpec.Name}"} in template["trialParameters"]


def test_reports_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "parameters: {lr: [1, 2]}\nobjective: {name: loss}\n"
    spec = written(tmp_path, capsys, text, ["python", "t.py", "{lr}"], "--image a:1")["spec"]
    assert spec["metricsCollectorSpec"]["source"]["filter"]["metricsFormat"] == [r"(loss)=(\S+)"]
    assert "RINGDANCE_SEARCH_REPORT" in json.dumps(spec["trialTemplate"])
    assert "print:loss" in json.dumps(spec["trialTemplate"])
    assert [one["name"] for one in spec["trialTemplate"]["trialParameters"]] == ["lr"]


def test_katibs_own_models_know_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they read and write again is what was written."""
    katib = pytest.importorskip("kubeflow.katib")
    spec = written(tmp_path, capsys)["spec"]

    class Response:
        data = json.dumps(spec)

    client = katib.ApiClient()
    made = client.deserialize(Response, "V1beta1ExperimentSpec")
    assert client.sanitize_for_serialization(made) == spec


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("sampler: {name: tpe", "sampler: {name: tpe, gamma: 1"), "what Katib has too is tpe and random"),
        (("pruner: {name: median", "pruner: {name: hyperband"), "what Katib has too is median"),
        (("pruner: {name: median", "pruner: {name: tpe"), "what Katib has too is median"),
        (("test accuracy: (", "(a) ("), "must be plain text"),
        (("line: 'test accuracy: ([0-9.]+)'", "file: '{dir}/x'"), "reads the launcher's output only"),
        (("--image registry/train:1", ""), "missing --image IMAGE"),
        (("--name digits", "--kind TrainJob"), "trials are MPIJobs"),
        (("python train.py", "python {dir}"), "there is no {dir}"),
        (("{lr}", "0.1"), "parameter lr gets to no trial"),
    ],
)
def test_what_katib_cannot_do(
    change: tuple[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE.replace(*change))
    words = f"{OPTIONS} -- {' '.join(COMMAND)}".replace(*change).split()
    assert main(["k8s", "manifest", "--katib", str(tmp_path / "space.yaml"), *words]) == 2
    assert said in capsys.readouterr().err
