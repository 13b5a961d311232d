"""Manifests: valid by the operators' own schemas, as secure as claimed, and mistakes reported early."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.job import JobRequest, parse_volume
from ringdance.submit.kubernetes.manifest import manifest

pytest.importorskip("jsonschema")
from kubernetes_schemas import problems

ALL = JobRequest(
    name="resnet",
    image="registry.example/train:1",
    command=["python", "train.py", "--note", "two words"],
    workers=4,
    slots=8,
    gpus=8,
    cpus="32",
    memory="200Gi",
    volumes=[
        parse_volume(text)
        for text in ("pvc:data:/data:ro", "nfs:10.0.0.7:/export:/nfs", "host:/scratch:/scratch",
                     "secret:s:/etc/s")
    ],
    env={"NCCL_DEBUG": "INFO"},
    secret_env={"HF_TOKEN": ("hub", "token")},
    retries=2,
    limit=3600,
    node_selector={"gpu": "a100"},
    pull_secrets=["registry"],
)  # fmt: skip
SMALL = JobRequest(name="small", image="x:1", command=["true"])


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pod_specs = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if "containers" in part:
                pod_specs.append(part)
            for value in part.values():
                walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(documents)
    return pod_specs


@pytest.mark.parametrize("request_", [ALL, SMALL], ids=["all options", "fewest"])
@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_manifests_are_valid_by_the_operators_schemas(kind: str, request_: JobRequest) -> None:
    for document in manifest(replace(request_, kind=kind)):
        assert problems(document) == []


def test_the_schemas_can_refuse() -> None:
    job = manifest(ALL)[0]
    for path, value in (
        (["spec", "slotsPerWorkers"], 2),
        (["spec", "mpiImplementation"], "LAM"),
        (["spec", "runPolicy", "ttlSecondsAfterFinished"], "week"),
        (["spec", "mpiReplicaSpecs", "Worker", "template", "spec", "container"], []),
    ):  # fmt: skip
        bad = copy.deepcopy(job)
        part = bad
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        assert problems(bad), path
    runtime, train = manifest(replace(ALL, kind="TrainJob"))
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["pods"] = 1
    train["spec"]["trainer"]["numNode"] = 1
    assert problems(runtime)
    assert problems(train)


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_pods_pass_the_restricted_pod_security_standard(kind: str) -> None:
    pod_specs = pods(manifest(replace(SMALL, kind=kind)))
    assert len(pod_specs) == 2
    for pod in pod_specs:
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] != 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert all(port["containerPort"] > 1024 for port in container.get("ports", []))


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_ranks_command_and_environment(kind: str) -> None:
    launchers = [pod for pod in pods(manifest(replace(ALL, kind=kind))) if "sshd" not in str(pod)]
    (launcher,) = (pod["containers"][0] for pod in launchers)
    assert launcher["command"] == [
        "ringdance", "run", "-np", "32", "-x", "NCCL_DEBUG", "-x", "HF_TOKEN", "--",
        "python", "train.py", "--note", "two words",
    ]  # fmt: skip
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in launcher["env"]
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in launcher["env"]
    assert "nvidia.com/gpu" not in launcher["resources"]["limits"]
    large = pods(manifest(replace(ALL, kind=kind, workers=200)))
    (limits,) = (pod["containers"][0]["resources"]["limits"] for pod in large if "sshd" not in str(pod))
    assert limits == {"memory": "4224Mi"}  # ssh and mpiexec need 8 MiB for each worker


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return what a container gets for a word of its command or a variable's value, by Kubernetes' rules."""
    return re.sub(
        r"\$(?:\$|\((.*?)\))",
        lambda found: "$" if found[1] is None else variables.get(found[1], found[0]),
        text,
    )


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_dollars_reach_the_ranks(kind: str) -> None:
    words = ["sh", "-c", "echo $$ $(HOSTNAME) $X ${Y} $$(HOSTNAME) a$"]
    documents = manifest(replace(SMALL, kind=kind, command=words, env={"PRICE": "$$5 $(HOSTNAME)"}))
    commands = [pod["containers"][0]["command"] for pod in pods(documents)]
    commands += [documents[1]["spec"]["trainer"]["command"]] if kind == "TrainJob" else []
    (env,) = (pod["containers"][0]["env"] for pod in pods(documents) if "env" in pod["containers"][0])
    assert [expanded(variable["value"], {"HOSTNAME": "h"}) for variable in env] == ["$$5 $(HOSTNAME)"]
    launches = [command for command in commands if command[0] == "ringdance"]
    assert len(launches) == len(commands) - 1
    for command in launches:
        assert [expanded(word, {"HOSTNAME": "h"}) for word in command][-3:] == words


def test_what_holds_for_the_whole_job() -> None:
    spec = manifest(ALL)[0]["spec"]
    assert spec["slotsPerWorker"] == 8
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running", "ttlSecondsAfterFinished": 604800, "backoffLimit": 2,
        "activeDeadlineSeconds": 3600,
    }  # fmt: skip
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 4
    container = worker["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "200Gi", "nvidia.com/gpu": 8}
    assert container["readinessProbe"]["tcpSocket"]["port"] == container["ports"][0]["containerPort"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    runtime, train = manifest(replace(ALL, kind="TrainJob"))
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"] == ["launcher"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Big_Job"}, "DNS label"),
        ({"name": "a" * 60}, "63 characters"),
        ({"workers": 0}, "--workers 0"),
        ({"slots": 0}, "--slots 0"),
        ({"gpus": -1}, "--gpus -1"),
        ({"memory": "32GB"}, "--memory 32GB"),
        ({"shm": "a lot"}, "--shm a lot"),
        ({"mpi": "LAM"}, "--mpi LAM"),
        ({"command": []}, "python train.py"),
        ({"env": {"A B": "1"}}, "'A B'"),
        ({"env": {"WANDB_API_KEY": "x-very-secret"}}, "--secret-env WANDB_API_KEY="),
    ],
)
def test_mistakes_are_reported_before_anything_is_submitted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        manifest(JobRequest(**{"name": "small", "image": "x:1", "command": ["true"], **change}))
    assert message in str(caught.value)
    assert "x-very-secret" not in str(caught.value)


def test_a_trainjob_is_open_mpi_s() -> None:
    request = JobRequest(name="small", image="x:1", command=["true"], mpi="MPICH")
    assert problems(manifest(request)[0]) == []
    with pytest.raises(LaunchError, match="MPIJob instead"):
        manifest(replace(request, kind="TrainJob"))


@pytest.mark.parametrize("text", ["data:/data", "pvc::/data", "pvc:x:data", "nfs:h:x:/y", "empty:9Gi:/x", ""])
def test_bad_volumes(text: str) -> None:
    with pytest.raises(LaunchError, match="--volume"):
        parse_volume(text)
