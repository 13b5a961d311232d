"""``ringdance k8s`` as a user types it, and its page's kubectl commands with a fake server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks, environment
from forked import run_forked
from kubernetes_api import KINDS, Api

from ringdance.tools.cli import main

yaml = pytest.importorskip("yaml")

WANTED = ["--image", "train:1", "--workers", "2", "--", "python", "train.py"]
LAUNCHER = {"training.kubeflow.org/job-name": "resnet", "training.kubeflow.org/job-role": "launcher"}


def k8s(*words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return run_forked(main, ["ringdance", "k8s", *words], environ=os.environ | environ, stdin=stdin)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api(dict(KINDS))
    yield api
    api.close()


def test_manifest_as_yaml() -> None:
    text = k8s("manifest", *WANTED)
    assert text.returncode == 0, text.stderr
    assert yaml.safe_load(text.stdout)["kind"] == "MPIJob"
    both = list(yaml.safe_load_all(k8s("manifest", "--kind", "TrainJob", *WANTED).stdout))
    assert [document["kind"] for document in both] == ["TrainingRuntime", "TrainJob"]


def test_slots_are_the_gpus_unless_given() -> None:
    made = yaml.safe_load(k8s("manifest", "--gpus", "4", *WANTED).stdout)
    assert made["spec"]["slotsPerWorker"] == 4
    made = yaml.safe_load(k8s("manifest", "--gpus", "4", "--slots", "2", *WANTED).stdout)
    assert made["spec"]["slotsPerWorker"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["manifest", "--image", "x:1"], "python train.py"),
        (["manifest", "-x", "NO_SUCH_VARIABLE_HERE", *WANTED], "not set here"),
        (["manifest", "--secret-env", "A=b", *WANTED], "A=SECRET/KEY"),
        (["manifest", "--node-selector", "gpu", *WANTED], "NAME=VALUE"),
        (["manifest", "--", "python", "train.py"], "--image"),
    ],
)
def test_what_cannot_be_understood_exits_with_2_and_says_why(words: list[str], message: str) -> None:
    done = k8s(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_kubectl_takes_the_manifest_and_the_commands_of_the_page(api: Api, tmp_path: Path, kind: str) -> None:
    page = ROOT / "docs" / "howto" / "clusters" / "kubernetes.md"
    words = ["--kind", kind, "--name", "resnet", *WANTED]
    (tmp_path / "job.yaml").write_text(k8s("manifest", *words).stdout)
    (block,) = [b for b in blocks(page) if Path(__file__).name in b.marks.get("in", "")]
    environ = environment() | {"KUBECONFIG": str(api.config(tmp_path)), "HOME": str(tmp_path)}
    ended = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 7}}}]}
    outputs = []
    for command, _ in block.commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=55
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        api.add_pod("resnet-launcher-x1", LAUNCHER, ended, "[0] hello\n[1] hello\n")
    created, pods, output, code, deleted = outputs
    assert created.count(" created\n") == deleted.count(" deleted") == 1 + (kind == "TrainJob")
    assert "resnet-launcher-x1" in pods
    assert (output, code) == ("[0] hello\n[1] hello\n", "7")
    assert {resource for resource, *_ in api.objects} == {"pods"}
