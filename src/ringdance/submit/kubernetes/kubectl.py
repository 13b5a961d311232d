"""Submit, follow and delete jobs with the user's own kubectl: its context and rights apply."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.job import Document

_MPIJOB, _TRAINJOB = "mpijobs.kubeflow.org", "trainjobs.trainer.kubeflow.org"
_TRAINER = "Kubeflow Trainer"
_OPERATORS = {"MPIJob": "the MPI operator", "TrainJob": _TRAINER, "TrainingRuntime": _TRAINER}
_NEVER = re.compile("InvalidImageName|ErrImageNeverPull")
# The kubelet tries again, after 10 s, then after 20, 40, ...: a registry may have been busy.
_RETRIED = re.compile("ErrImagePull|(ImagePull|CrashLoop)BackOff|CreateContainer(Config)?Error")
_RETRIED_S = 150.0
# What was asked for may have been done, or not.
_LOST = re.compile("no answer|time(d )?out|EOF|connection (lost|reset)|deadline exceeded", re.IGNORECASE)
_MANAGERS = ("--ignore-not-found", "--show-managed-fields", "-o", "json")


@dataclass
class Kubectl:
    """kubectl with its options.

    Attributes:
        namespace: "" for that of kubectl's context.
        context: "" for kubectl's current one.
    """

    namespace: str = ""
    context: str = ""

    def line(self, *words: str) -> list[str]:
        """Return the command line of kubectl with `words`.

        Raises:
            LaunchError: there is no kubectl.
        """
        program = shutil.which("kubectl")
        if not program:
            raise LaunchError(
                "kubectl was not found in PATH. Install it (https://kubernetes.io/docs/tasks/tools), or "
                "write the manifest with `ringdance k8s manifest` and submit it elsewhere"
            )
        options = [f"--namespace={self.namespace}"] if self.namespace else []
        options += [f"--context={self.context}"] if self.context else []
        return [program, *options, *words]

    def run(self, *words: str, stdin: str = "", timeout: float = 60.0) -> str:
        """Run kubectl and return its output.

        Raises:
            LaunchError: it failed, with its stderr, or did not end within `timeout` seconds.
        """
        try:
            done = subprocess.run(
                self.line(*words), input=stdin, capture_output=True, text=True, errors="replace",
                timeout=timeout, check=False,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"kubectl {words[0]}: no answer from the cluster within {timeout:g} s"
            ) from None
        if done.returncode:
            raise LaunchError(f"kubectl {words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout

    def pods(self, resource: str, name: str, workers: bool) -> list[Document]:
        """Get the pods of a job's launcher, or of its workers."""
        labels = _selector(resource, name, workers)
        found: list[Document] = json.loads(self.run("get", "pods", labels, "-o", "json"))["items"]
        return found

    def resource_of(self, name: str) -> str:
        """Return the resource type of the job `name`.

        Raises:
            LaunchError: no such job, or kubectl failed.
        """
        unknown = 0
        for resource in (_MPIJOB, _TRAINJOB):
            try:
                if self.run("get", resource, name, "--ignore-not-found", "-o", "name").strip():
                    return resource
            except LaunchError as error:
                if "resource type" not in str(error):
                    raise
                unknown += 1  # that operator is not installed
        if unknown == 2:
            raise LaunchError(
                "this cluster knows neither MPIJobs nor TrainJobs: an administrator must install the MPI "
                "operator (kubeflow/mpi-operator) or Kubeflow Trainer (kubeflow/trainer)"
            )
        where = f"namespace {self.namespace!r}" if self.namespace else "the namespace of kubectl's context"
        raise LaunchError(
            f"there is no job {name!r} in {where}; `kubectl get mpijobs,trainjobs -A` lists all"
        )


def _selector(resource: str, name: str, workers: bool) -> str:
    """Select a job's launcher, or its workers, by label."""
    if resource == _MPIJOB:
        role = "worker" if workers else "launcher"
        return f"--selector=training.kubeflow.org/job-name={name},training.kubeflow.org/job-role={role}"
    role = "node" if workers else "launcher"
    return f"--selector=jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name={role}"


def submit(documents: Sequence[Document], kubectl: Kubectl) -> str:
    """Create the documents and return kubectl's output.

    Raises:
        LaunchError: the cluster refuses one: with the next step where it is known. None is left,
            not even one whose answer was lost.
    """
    output, manager = "", f"ringdance-{secrets.token_hex(8)}"  # by which objects are known as made here
    create = ("create", "-f", "-", f"--field-manager={manager}")
    for number, document in enumerate(documents):
        name, kind = document["metadata"]["name"], document["kind"]
        try:
            # As JSON, which kubectl takes too: no YAML package is needed.
            output += kubectl.run(*create, stdin=json.dumps(document))
        except LaunchError as error:
            text = str(error)
            if "AlreadyExists" in text or "already exists" in text:
                text += f"\nTake another name, or first: ringdance k8s delete {name}"
            elif "no matches for kind" in text or "resource type" in text:
                operator = _OPERATORS.get(kind, "its operator")
                text += f"\nThe cluster does not know {kind}: an administrator must install {operator}"
            for made in documents[: number + bool(_LOST.search(text))]:
                try:
                    if manager in kubectl.run("get", "-f", "-", *_MANAGERS, stdin=json.dumps(made)):
                        kubectl.run("delete", "-f", "-", stdin=json.dumps(made))
                except LaunchError as left:
                    text += f"\n{made['kind']} {made['metadata']['name']} may still be there: {left}"
            raise LaunchError(text) from None
    return output


def delete(name: str, kubectl: Kubectl) -> str:
    """Delete a job with its pods and return kubectl's output.

    Raises:
        LaunchError: no such job, or the cluster refuses.
    """
    resource = kubectl.resource_of(name)
    output = kubectl.run("delete", resource, name, timeout=120.0)
    if resource == _TRAINJOB:
        runtime = "trainingruntimes.trainer.kubeflow.org"
        output += kubectl.run("delete", runtime, name, "--ignore-not-found")
    return output


def logs(
    name: str, kubectl: Kubectl, follow: bool = False, workers: bool = False, timeout: float = 600.0
) -> int:
    """Show a job's output; return kubectl's exit code, or with `follow` that of the job.

    With `follow`, first wait up to `timeout` seconds until the launcher runs, and show what it waits for.

    Raises:
        LaunchError: no such job, or it cannot start: with Kubernetes' own reason.
    """
    resource = kubectl.resource_of(name)
    if follow:
        _wait_for_start(resource, name, kubectl, timeout)
    words = ["logs", _selector(resource, name, workers), "--tail=-1", "--max-log-requests=1000"]
    words += ["--prefix"] * workers + ["--follow"] * follow
    sys.stdout.flush()
    code = subprocess.run(kubectl.line(*words), check=False).returncode
    return code or (_exit_code(resource, name, kubectl) if follow and not workers else 0)


def _exit_code(resource: str, name: str, kubectl: Kubectl) -> int:
    """Return the exit code of the newest launcher; its log may end a moment before its status changes."""
    for _ in range(10):
        pods = kubectl.pods(resource, name, workers=False)
        if not pods:
            raise LaunchError("the launcher's pod was deleted: its exit code is unknown")
        last = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        for container in last["status"].get("containerStatuses", ())[:1]:
            if ended := (container.get("state") or {}).get("terminated"):
                return int(ended["exitCode"])
        time.sleep(1.0)
    raise LaunchError("the output has ended, but the launcher's pod has not: see `ringdance k8s logs`")


def _wait_for_start(resource: str, name: str, kubectl: Kubectl, timeout: float) -> None:
    start = failing = time.monotonic()
    shown = ""
    while True:
        pods = kubectl.pods(resource, name, workers=False)
        if any((pod.get("status") or {}).get("phase", "") not in ("Pending", "Unknown", "") for pod in pods):
            return
        pods += kubectl.pods(resource, name, workers=True)
        reasons = sorted(set(filter(None, map(waits_for, pods))))
        now = "; ".join(reasons) or "its pods are being created"
        if now != shown:
            print(f"ringdance: {name} has not started: {now}", file=sys.stderr, flush=True)
            shown = now
        moment = time.monotonic()
        failing = failing if _RETRIED.search(now) else moment
        if _NEVER.search(now) or moment - failing > _RETRIED_S:
            raise LaunchError(f"{name} cannot start: {now}. Fix it, and `ringdance k8s delete {name}`")
        if moment > start + timeout:
            raise LaunchError(f"{name} has not started within {timeout:g} s (--wait): {now}")
        time.sleep(2.0)


def waits_for(pod: Document) -> str:
    """Return why a pod does not run, "" if it does."""
    name = pod["metadata"]["name"]
    status: dict[str, Any] = pod.get("status") or {}
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        if waiting := (container.get("state") or {}).get("waiting"):
            text = f"{name}: {waiting.get('reason', 'waiting')}"
            return f"{text}, {waiting['message']}" if waiting.get("message") else text
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{name}: {condition.get('message') or condition.get('reason')}"
    return ""
