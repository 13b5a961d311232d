"""``ringdance k8s`` as a person types it: the real kubectl against a server that keeps what it is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_api import KINDS, Api

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes import kubectl
from ringdance.submit.kubernetes.cli import main
from ringdance.submit.kubernetes.kubectl import Kubectl

yaml = pytest.importorskip("yaml")

Run = Callable[..., subprocess.CompletedProcess[str]]
WANTED = ["--image", "train:1", "--name", "pi", "--workers", "2", "--", "python", "train.py"]
LAUNCHER = {"training.kubeflow.org/job-name": "pi", "training.kubeflow.org/job-role": "launcher"}


def k8s(*words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringdance", "k8s", *words],
        input=stdin, env=os.environ | environ, capture_output=True, text=True, timeout=55,
    )  # fmt: skip


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api(dict(KINDS))
    yield api
    api.close()


@pytest.fixture
def run(api: Api, tmp_path: Path) -> Run:
    if not shutil.which("kubectl"):
        pytest.skip("there is no kubectl")
    environ = {"KUBECONFIG": str(api.config(tmp_path)), "HOME": str(tmp_path)}
    return lambda *words, stdin="": k8s(*words, stdin=stdin, **environ)


def ended(code: int) -> dict[str, Any]:
    return {"phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"state": {"terminated": {"exitCode": code}}}]}  # fmt: skip


def test_manifest_as_yaml_and_json() -> None:
    text = k8s("manifest", *WANTED)
    assert text.returncode == 0, text.stderr
    assert yaml.safe_load(text.stdout) == json.loads(k8s("manifest", "--json", *WANTED).stdout)
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
        (["submit", "--", "python", "train.py"], "--image"),
        (["submit", "-f", "no-such-file.yaml"], "No such file"),
        (["convert", "-"], "empty"),
    ],
)
def test_what_cannot_be_understood_exits_with_2_and_says_why(words: list[str], message: str) -> None:
    done = k8s(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_convert_keeps_what_is_no_mpijob_and_notes_what_it_did() -> None:
    pod = {"spec": {"containers": [{"name": "main", "image": "x", "command": ["sleep", "1d"]}]}}
    old = {
        "apiVersion": "kubeflow.org/v1", "kind": "MPIJob", "metadata": {"name": "old"},
        "spec": {"mpiReplicaSpecs": {"Launcher": {"template": pod}, "Worker": {"template": pod}}},
    }  # fmt: skip
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}
    done = k8s("convert", "-", stdin=yaml.safe_dump_all([other, old]))
    assert done.returncode == 0, done.stderr
    kept, new = yaml.safe_load_all(done.stdout)
    assert kept == other
    assert new["apiVersion"] == "kubeflow.org/v2beta1"
    assert "old: the worker's command 'sleep 1d' has been removed" in done.stderr
    assert k8s("convert", "-", stdin=json.dumps([1])).returncode == 2


def test_what_is_no_utf8_is_not_altered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_bytes("kind: ConfigMap\ndata: {a: é}\n".encode("latin1"))
    assert main(["convert", str(tmp_path / "job.yaml")]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "job.yaml: byte 0xe9 at position 26 (line 2) is no UTF-8; convert" in shown.err


def test_submit_logs_and_delete(run: Run, api: Api) -> None:
    done = run("submit", *WANTED)
    assert (done.returncode, done.stdout) == (0, "mpijob.kubeflow.org/pi created\n"), done.stderr
    kept = api.objects["mpijobs", "lab", "pi"]
    assert kept["spec"] == yaml.safe_load(k8s("manifest", *WANTED).stdout)["spec"]
    again = run("submit", *WANTED)
    assert again.returncode == 2
    assert "ringdance k8s delete pi" in again.stderr
    api.add_pod("pi-launcher-x1", LAUNCHER, ended(0), "[0] hello\n[1] hello\n")
    assert run("logs", "pi").stdout == "[0] hello\n[1] hello\n"
    done = run("delete", "pi")
    assert done.returncode == 0, done.stderr
    assert ("mpijobs", "lab", "pi") not in api.objects


def test_follow_ends_with_the_exit_code_of_the_job(run: Run, api: Api) -> None:
    api.add_pod("pi-launcher-x1", LAUNCHER, ended(7), "[1] failed\n")
    done = run("submit", "--follow", *WANTED)
    assert done.stdout == "mpijob.kubeflow.org/pi created\n[1] failed\n"
    assert done.returncode == 7


def test_a_trainjob_goes_with_its_runtime(run: Run, api: Api) -> None:
    assert run("submit", "--kind", "TrainJob", *WANTED).returncode == 0
    assert set(api.objects) == {("trainingruntimes", "lab", "pi"), ("trainjobs", "lab", "pi")}
    labels = {"jobset.sigs.k8s.io/jobset-name": "pi", "jobset.sigs.k8s.io/replicatedjob-name": "launcher"}
    api.add_pod("pi-launcher-0-0-x", labels, ended(0), "done\n")
    assert run("logs", "--follow", "pi").stdout == "done\n"
    assert run("delete", "pi").returncode == 0
    assert set(api.objects) == {("pods", "lab", "pi-launcher-0-0-x")}


def test_a_job_that_cannot_start_is_reported_with_the_reason(run: Run, api: Api) -> None:
    assert run("submit", *WANTED).returncode == 0
    waiting = {"reason": "InvalidImageName", "message": "couldn't parse image reference"}
    status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    api.add_pod("pi-worker-0", LAUNCHER | {"training.kubeflow.org/job-role": "worker"}, status)
    done = run("logs", "--follow", "pi")
    assert done.returncode == 2
    assert "pi-worker-0: InvalidImageName, couldn't parse image reference" in done.stderr


class Pulling(Kubectl):
    """A worker whose image is pulled in vain until a moment of a clock that stands still but for sleeps."""

    now, until = 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pods(self, resource: str, name: str, workers: bool) -> list[dict[str, Any]]:
        if self.now >= self.until:
            return [{"metadata": {"name": "pi-launcher"}, "status": {"phase": "Running"}}]
        reason = "ErrImagePull" if self.now % 20 < 4 else "ImagePullBackOff"
        status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}
        return [{"metadata": {"name": "pi-worker-0"}, "status": status}]


def test_an_image_may_come_at_a_later_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kubelet tries again after 10, 20, 40, ... seconds: a registry may have been busy."""
    cluster = Pulling()
    monkeypatch.setattr(kubectl, "time", cluster)
    cluster.until = 75.0
    kubectl._wait_for_start("mpijobs", "pi", cluster, 600.0)
    assert "pi has not started: pi-worker-0: ErrImagePull" in capsys.readouterr().err
    cluster.until = 1000.0
    with pytest.raises(LaunchError, match="pi cannot start: pi-worker-0: "):
        kubectl._wait_for_start("mpijobs", "pi", cluster, 600.0)
    assert 150.0 < cluster.now - 75.0 < 160.0


def test_what_was_created_before_a_failure_is_deleted(run: Run, api: Api) -> None:
    api.objects["trainjobs", "lab", "pi"] = {"metadata": {"name": "pi"}}
    done = run("submit", "--kind", "TrainJob", *WANTED)
    assert (done.returncode, "ringdance k8s delete pi" in done.stderr) == (2, True), done.stderr
    assert set(api.objects) == {("trainjobs", "lab", "pi")}


def test_what_was_created_without_an_answer_is_deleted(run: Run, api: Api) -> None:
    api.lost = {"mpijobs", "trainjobs"}
    for kind in ("MPIJob", "TrainJob"):
        done = run("submit", "--kind", kind, *WANTED)
        assert (done.returncode, "(Timeout)" in done.stderr) == (2, True), done.stderr
        assert "may still be there" not in done.stderr
        assert not api.objects


def test_a_job_that_waits_for_nodes_says_so(run: Run, api: Api) -> None:
    assert run("submit", *WANTED).returncode == 0
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have 8 GPUs"}
    api.add_pod("pi-launcher-x1", LAUNCHER, {"phase": "Pending", "conditions": [condition]})
    done = run("logs", "--follow", "--wait", "0", "pi")
    assert done.returncode == 2
    assert "0/3 nodes have 8 GPUs" in done.stderr


def test_what_is_not_there(run: Run, api: Api) -> None:
    done = run("delete", "nothing")
    assert (done.returncode, "no job 'nothing'" in done.stderr) == (2, True)


def test_a_cluster_without_the_operators(run: Run, api: Api) -> None:
    api.kinds = {}
    done = run("submit", *WANTED)
    assert done.returncode == 2
    assert "must install the MPI operator" in done.stderr
    done = run("logs", "pi")
    assert "neither MPIJobs nor TrainJobs" in done.stderr


def test_without_kubectl(tmp_path: Path) -> None:
    done = k8s("submit", *WANTED, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "kubectl was not found" in done.stderr
