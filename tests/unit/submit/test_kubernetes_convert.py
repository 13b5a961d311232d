"""Old MPIJobs brought up to date: what comes out is valid, and nothing is decided without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.convert import convert

pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")
from kubernetes_schemas import problems  # noqa: E402

V1 = yaml.safe_load("""
apiVersion: kubeflow.org/v1
kind: MPIJob
metadata:
  name: resnet
  uid: 1-2-3
  resourceVersion: "77"
  annotations: {kubectl.kubernetes.io/last-applied-configuration: "{}", team: vision}
spec:
  slotsPerWorker: 8
  cleanPodPolicy: Running
  backoffLimit: 3
  mainContainer: main
  runPolicy: {ttlSecondsAfterFinished: 60, backoffLimit: 1}
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          restartPolicy: OnFailure
          containers:
          - {name: sidecar, image: "log:1"}
          - name: main
            image: train:1
            env: [{name: OMPI_MCA_plm_rsh_agent, value: /etc/mpi/kubexec.sh}, {name: A, value: "1"}]
            command: [mpirun, --allow-run-as-root, -np, "16", -bind-to, none, -map-by, slot]
            args: [-mca, plm_rsh_agent, /etc/mpi/kubexec.sh, -mca, pml, ob1, -x, PATH, python, train.py]
    Worker:
      replicas: 2
      restartPolicy: ExitCode
      template:
        spec:
          containers:
          - name: main
            image: train:1
            command: [sleep, 365d]
            resources: {limits: {nvidia.com/gpu: 8}}
            volumeMounts: [{mountPath: /data, name: data}]
          volumes: [{name: data, nfs: {server: nas, path: /}}]
status: {startTime: yesterday}
""")
V1ALPHA1 = yaml.safe_load("""
apiVersion: kubeflow.org/v1alpha1
kind: MPIJob
metadata: {name: bench}
spec:
  processingUnits: 16
  processingUnitsPerNode: 4
  backoffLimit: 6
  template:
    spec:
      containers:
      - name: main
        image: train:1
        command: [mpirun, python, train.py]
        resources: {limits: {memory: 8Gi}}
""")


def changed(document: dict[str, Any], **spec: Any) -> dict[str, Any]:
    new = copy.deepcopy(document)
    new["spec"] |= spec
    return new


def test_v1() -> None:
    before = copy.deepcopy(V1)
    new, notes = convert(V1)
    assert before == V1
    assert problems(new) == []
    assert new["metadata"] == {"name": "resnet", "annotations": {"team": "vision"}}
    spec = new["spec"]
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 1,
        "ttlSecondsAfterFinished": 60,
    }
    assert spec["slotsPerWorker"] == 8
    assert spec["sshAuthMountPath"] == "/root/.ssh"
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    assert (launcher["restartPolicy"], worker["restartPolicy"]) == ("OnFailure", "Never")
    main = launcher["template"]["spec"]["containers"][0]
    assert main["name"] == "main"
    assert main["command"] == [
        "mpirun", "--allow-run-as-root", "-np", "16", "--bind-to", "none", "--map-by", "slot",
    ]  # fmt: skip
    assert main["args"] == ["--mca", "pml", "ob1", "-x", "PATH", "python", "train.py"]
    assert main["env"] == [{"name": "A", "value": "1"}]
    pod = worker["template"]["spec"]
    assert "command" not in pod["containers"][0]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"] == V1["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    text = "\n".join(notes)
    for message in ("kubexec.sh", "sleep 365d", "ExitCode", "mainContainer main", "sshd", "mpirun"):
        assert message in text, message


def test_v1alpha2_with_its_mpi_distribution() -> None:
    old = changed(V1, mpiDistribution="intel_mpi") | {"apiVersion": "kubeflow.org/v1alpha2"}
    new, notes = convert(old)
    assert new["spec"]["mpiImplementation"] == "Intel"
    assert problems(new) == []
    assert any("intel_mpi" in note for note in notes)


def test_v1alpha1_is_divided_into_launcher_and_workers() -> None:
    new, _ = convert(V1ALPHA1)
    assert problems(new) == []
    spec = new["spec"]
    assert spec["slotsPerWorker"] == 4
    assert spec["runPolicy"]["backoffLimit"] == 6
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 4
    container = worker["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 4}
    assert "command" not in container
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["resources"] == {"limits": {"memory": "8Gi"}}
    assert launcher["command"] == ["mpirun", "python", "train.py"]


@pytest.mark.parametrize(
    ("spec", "workers", "slots"),
    [
        ({"processingUnits": None, "replicas": 3}, 3, 1),
        ({"processingUnits": None, "gpus": 2, "processingUnitsPerNode": None, "gpusPerNode": 8}, 1, 2),
        ({"processingUnits": 4, "processingUnitsPerNode": None}, 4, 1),
        ({"slotsPerWorker": 1}, 4, 1),
        ({"processingResourceType": "cpu"}, 4, 4),
    ],
)
def test_sizes_of_v1alpha1(spec: dict[str, Any], workers: int, slots: int) -> None:
    new, notes = convert(changed(V1ALPHA1, **spec))
    assert problems(new) == []
    assert new["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == workers
    assert new["spec"]["slotsPerWorker"] == slots
    assert any(f"{workers} workers" in note for note in notes)


def test_the_launcher_on_the_master_stays_there() -> None:
    new, _ = convert(changed(V1ALPHA1, launcherOnMaster=True))
    assert problems(new) == []
    replicas = new["spec"]["mpiReplicaSpecs"]
    assert "nodeSelector" in replicas["Launcher"]["template"]["spec"]
    assert "nodeSelector" not in replicas["Worker"]["template"]["spec"]


def test_pods_without_root_get_their_own_ssh_directory() -> None:
    old = copy.deepcopy(V1)
    old["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["securityContext"] = {"runAsUser": 1000}
    new, notes = convert(old)
    assert new["spec"]["sshAuthMountPath"] == "/home/mpiuser/.ssh"
    assert any("user 1000" in note for note in notes)


def test_what_is_new_already_stays_as_it_is() -> None:
    new, _ = convert(V1)
    again, notes = convert(new)
    assert again == new
    assert "already" in notes[0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"apiVersion": "v1", "kind": "Pod"}, "no MPIJob"),
        ({"apiVersion": "kubeflow.org/v9", "kind": "MPIJob"}, "v9"),
        ({"apiVersion": "kubeflow.org/v1", "kind": "MPIJob"}, "Launcher"),
        ({"apiVersion": "kubeflow.org/v1alpha1", "kind": "MPIJob", "spec": {}}, "template"),
        (changed(V1ALPHA1, processingUnits=6), "cannot be divided"),
        (changed(V1ALPHA1, processingUnits=None), "how large"),
        (changed(V1, mpiDistribution="lam"), "lam"),
    ],
)
def test_what_cannot_be_converted(document: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        convert(document)
