"""Submit, follow and delete jobs on Kubernetes, by the user's own kubectl: its context and rights hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.manifest import Document

_KINDS = {"mpijob": "mpijobs.kubeflow.org", "trainjob": "trainjobs.trainer.kubeflow.org"}
_OPERATORS = {
    "MPIJob": "the MPI operator",
    "TrainJob": "Kubeflow Trainer",
    "TrainingRuntime": "Kubeflow Trainer",
}
_HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CrashLoopBackOff",
)


@dataclass
class Kubectl:
    """kubectl with its options.

    Attributes:
        namespace: "" for that of kubectl's context.
        context: "" for kubectl's current one.
        program: its path.
    """

    namespace: str = ""
    context: str = ""
    program: str = field(default_factory=lambda: shutil.which("kubectl") or "")

    def line(self, *words: str) -> list[str]:
        """The whole command line.

        Raises:
            LaunchError: there is no kubectl.
        """
        if not self.program:
            raise LaunchError(
                "kubectl was not found in PATH. Install it (https://kubernetes.io/docs/tasks/tools), or "
                "write the manifest with `ringdance k8s manifest` and submit it elsewhere"
            )
        options = [f"--namespace={self.namespace}"] if self.namespace else []
        options += [f"--context={self.context}"] if self.context else []
        return [self.program, *options, *words]

    def run(self, *words: str, stdin: str = "", limit: float = 60.0) -> str:
        """What kubectl prints.

        Raises:
            LaunchError: it failed, with what it said, or did not end within `limit` seconds.
        """
        try:
            done = subprocess.run(
                self.line(*words), input=stdin, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"kubectl {words[0]}: no answer from the cluster within {limit:g} s") from None
        if done.returncode:
            raise LaunchError(f"kubectl {words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout

    def kind_of(self, name: str) -> str:
        """The resource type of the job `name`.

        Raises:
            LaunchError: no such job, or the cluster cannot be asked.
        """
        problems = []
        for resource in _KINDS.values():
            try:
                if self.run("get", resource, name, "--ignore-not-found", "-o", "name").strip():
                    return resource
            except LaunchError as error:
                if "resource type" not in str(error):  # that operator is not installed: no fault
                    raise
                problems.append(resource)
        if len(problems) == len(_KINDS):
            raise LaunchError(
                "this cluster knows neither MPIJobs nor TrainJobs: an administrator must install the MPI "
                "operator (kubeflow/mpi-operator) or Kubeflow Trainer (kubeflow/trainer)"
            )
        where = f"namespace {self.namespace!r}" if self.namespace else "the namespace of kubectl's context"
        raise LaunchError(
            f"there is no job {name!r} in {where}; `kubectl get mpijobs,trainjobs -A` lists all"
        )


def submit(documents: Sequence[Document], kubectl: Kubectl) -> str:
    """Create the documents; what kubectl says.

    Raises:
        LaunchError: the cluster refuses them: with the next step where it is known.
    """
    said = ""
    for document in documents:
        name, kind = document["metadata"]["name"], document["kind"]
        try:
            # Read by JSON: kubectl takes it as well, and no YAML package is needed here.
            said += kubectl.run("create", "-f", "-", stdin=json.dumps(document))
        except LaunchError as error:
            text = str(error)
            if "AlreadyExists" in text or "already exists" in text:
                text += f"\nTake another name, or first: ringdance k8s delete {name}"
            elif "no matches for kind" in text or "resource type" in text:
                operator = _OPERATORS.get(kind, "its operator")
                text += f"\nThe cluster does not know {kind}: an administrator must install {operator}"
            raise LaunchError(text) from None
    return said


def delete(name: str, kubectl: Kubectl) -> str:
    """Delete a job with its pods; what kubectl says.

    Raises:
        LaunchError: no such job, or the cluster refuses.
    """
    resource = kubectl.kind_of(name)
    said = kubectl.run("delete", resource, name, limit=120.0)
    if resource == _KINDS["trainjob"]:
        runtime = "trainingruntimes.trainer.kubeflow.org"
        said += kubectl.run("delete", runtime, name, "--ignore-not-found")
    return said


def selector(resource: str, name: str, workers: bool = False) -> str:
    """Labels of a job's launcher, or of its workers."""
    if resource == _KINDS["mpijob"]:
        role = "worker" if workers else "launcher"
        return f"training.kubeflow.org/job-name={name},training.kubeflow.org/job-role={role}"
    role = "node" if workers else "launcher"
    return f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name={role}"


def logs(
    name: str, kubectl: Kubectl, follow: bool = False, workers: bool = False, wait: float = 600.0
) -> int:
    """Show a job's output; kubectl's exit code, or with `follow` that of the job.

    With `follow`, first wait up to `wait` seconds until the launcher runs, and tell what it waits for.

    Raises:
        LaunchError: no such job, or it cannot start: with Kubernetes' own reason.
    """
    resource = kubectl.kind_of(name)
    if follow:
        _wait(resource, name, kubectl, wait)
    labels = selector(resource, name, workers)
    words = ["logs", f"--selector={labels}", "--tail=-1", "--max-log-requests=1000"]
    words += ["--prefix"] if workers else []
    words += ["--follow"] if follow else []
    sys.stdout.flush()
    code = subprocess.run(kubectl.line(*words), check=False).returncode
    return code or (_exit_code(selector(resource, name), kubectl) if follow and not workers else 0)


def _exit_code(labels: str, kubectl: Kubectl) -> int:
    """How the launcher that began last has ended; its log may end a moment before the pod is told to have."""
    for _ in range(10):
        pods = json.loads(kubectl.run("get", "pods", f"--selector={labels}", "-o", "json"))["items"]
        last = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)
        if last is None:
            raise LaunchError("the launcher's pod has been deleted: how the job ended is not known")
        for container in last["status"].get("containerStatuses", ())[:1]:
            ended = (container.get("state") or {}).get("terminated")
            if ended:
                return int(ended["exitCode"])
        time.sleep(1.0)
    raise LaunchError("the output has ended, but the launcher's pod has not: see `ringdance k8s logs`")


def _wait(resource: str, name: str, kubectl: Kubectl, seconds: float) -> None:
    end = time.monotonic() + seconds
    told = ""
    while True:
        pods: list[Document] = []
        for workers in (False, True):
            labels = selector(resource, name, workers)
            found = json.loads(kubectl.run("get", "pods", f"--selector={labels}", "-o", "json"))["items"]
            if not workers and any(_phase(pod) not in ("Pending", "Unknown", "") for pod in found):
                return
            pods += found
        reasons = sorted(set(filter(None, map(waits_for, pods))))
        now = "; ".join(reasons) or "its pods are being made"
        if now != told:
            print(f"ringdance: {name} has not started: {now}", file=sys.stderr, flush=True)
            told = now
        if any(reason in text for reason in _HOPELESS for text in reasons):
            raise LaunchError(f"{name} cannot start: {now}. Mend it, and `ringdance k8s delete {name}`")
        if time.monotonic() > end:
            raise LaunchError(f"{name} has not started within {seconds:g} s (--wait): {now}")
        time.sleep(2.0)


def _phase(pod: Document) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def waits_for(pod: Document) -> str:
    """Why a pod does not run, "" if it does."""
    name = pod["metadata"]["name"]
    status: dict[str, Any] = pod.get("status") or {}
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            text = f"{name}: {waiting.get('reason', 'waiting')}"
            return f"{text}, {waiting['message']}" if waiting.get("message") else text
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{name}: {condition.get('message') or condition.get('reason')}"
    return ""
