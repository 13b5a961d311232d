"""Convert old MPIJobs (v1alpha1, v1alpha2, v1) to v2beta1, with a note on every decision.

Before v2beta1 the launcher reached its workers by ``kubectl exec``, and these only slept; since then it uses
ssh, and they run an ssh daemon. v1alpha1 had one pod template for both.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.job import Document
from ringdance.submit.kubernetes.manifest import GPU, SSH_DIRECTORY

OLD = ("v1alpha1", "v1alpha2", "v1")
_IMPLEMENTATIONS = {"open_mpi": "OpenMPI", "intel_mpi": "Intel", "mpich": "MPICH"}
_RUN_POLICY = (
    "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy",
    "suspend",
)  # fmt: skip
_SET_BY_SERVER = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid")
_ONE_DASH = re.compile(
    r"-(bind-to|map-by|rank-by|mca|output-filename|report-bindings|tag-output|hostfile|host)"
)
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
_AGENT = "OMPI_MCA_plm_rsh_agent"

Note = Callable[[str], None]


def convert(document: Document) -> tuple[Document, list[str]]:
    """Convert an MPIJob to v2beta1; return it with notes for the user.

    Args:
        document: an MPIJob of any version; it is not changed.

    Raises:
        LaunchError: it is no MPIJob, or lacks what the conversion needs.
    """
    group, _, version = str(document.get("apiVersion", "")).partition("/")
    if group != "kubeflow.org" or document.get("kind") != "MPIJob":
        raise LaunchError(
            f"this is no MPIJob of kubeflow.org, but {document.get('apiVersion')}, {document.get('kind')}"
        )
    document = copy.deepcopy(document)
    if version == "v2beta1":
        return document, ["already version v2beta1: unchanged"]
    if version not in OLD:
        raise LaunchError(f"MPIJob of version {version!r}: known are {', '.join(OLD)} and v2beta1")
    notes: list[str] = []
    note, old = notes.append, document.get("spec") or {}
    new = _from_v1(_to_v1(old, note) if version == "v1alpha1" else old, note)
    for kind in ("Launcher", "Worker"):
        replica = new["mpiReplicaSpecs"].get(kind)
        if not replica or not replica.get("template", {}).get("spec", {}).get("containers"):
            raise LaunchError(f"spec.mpiReplicaSpecs.{kind}: it is missing, or has no container")
        _order_containers(replica["template"]["spec"], str(old.get("mainContainer") or ""), note)
        _convert_restart_policy(kind, replica, note)
        main = replica["template"]["spec"]["containers"][0]
        (_convert_launcher if kind == "Launcher" else _convert_worker)(main, note)
    new["sshAuthMountPath"] = _ssh_directory(new, note)
    note(
        "the launcher now uses ssh: the image must have sshd and an ssh client that trusts its workers' keys"
    )
    metadata = {k: v for k, v in (document.get("metadata") or {}).items() if k not in _SET_BY_SERVER}
    (metadata.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": metadata, "spec": new}, notes


def _from_v1(spec: Document, note: Note) -> Document:
    policy = {"cleanPodPolicy": "None"}
    for source in (spec, spec.get("runPolicy") or {}):
        policy |= {name: source[name] for name in _RUN_POLICY if source.get(name) is not None}
    if policy["cleanPodPolicy"] == "None":
        note("runPolicy.cleanPodPolicy is None: the workers keep running after the end; Running removes them")
    new: Document = {"slotsPerWorker": spec.get("slotsPerWorker") or 1, "runPolicy": policy}
    distribution = spec.get("mpiDistribution")
    if distribution is not None:
        if distribution not in _IMPLEMENTATIONS:
            raise LaunchError(
                f"spec.mpiDistribution: {distribution!r} is none of {', '.join(_IMPLEMENTATIONS)}"
            )
        new["mpiImplementation"] = _IMPLEMENTATIONS[distribution]
        note(f"mpiDistribution {distribution} is now mpiImplementation {new['mpiImplementation']}")
    replicas = spec.get("mpiReplicaSpecs") or {}
    new["mpiReplicaSpecs"] = {kind: replicas[kind] for kind in ("Launcher", "Worker") if replicas.get(kind)}
    for kind, replica in new["mpiReplicaSpecs"].items():
        if replica.get("replicas") is None:
            replica["replicas"] = 1
            note(f"{kind}.replicas was not given: 1")
    return new


def _to_v1(spec: Document, note: Note) -> Document:
    """Divide the single pod template of a v1alpha1 job, whose workers were always removed at the end."""
    template = spec.get("template") or {}
    if not (template.get("spec") or {}).get("containers"):
        raise LaunchError("spec.template: it is missing, or has no container")
    resource = spec.get("processingResourceType") or "gpu"
    resource = GPU if resource == "gpu" else resource
    resources = template["spec"]["containers"][0].get("resources") or {}
    of_template = int((resources.get("limits") or {}).get(resource, 0))
    for part in ("limits", "requests"):
        (resources.get(part) or {}).pop(resource, None)
    launcher, worker = template["spec"], copy.deepcopy(template["spec"])
    workers, units = _size(spec, of_template, note)
    if units:
        limits = {**(resources.get("limits") or {}), resource: units}
        worker["containers"][0]["resources"] = {**resources, "limits": limits}
    if spec.get("launcherOnMaster"):
        launcher.setdefault("nodeSelector", {})[_CONTROL_PLANE] = ""
        toleration = {"key": _CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"}
        launcher.setdefault("tolerations", []).append(toleration)
        note(f"launcherOnMaster: the launcher's nodeSelector is {_CONTROL_PLANE}")
    slots = spec.get("slotsPerWorker") or units or 1
    note(f"{workers} workers with {slots} slots each, from the single template of v1alpha1")
    replicas = {
        "Launcher": {"replicas": 1, "template": template},
        "Worker": {"replicas": workers, "template": {**template, "spec": worker}},
    }
    return {"cleanPodPolicy": "Running", **spec, "slotsPerWorker": slots, "mpiReplicaSpecs": replicas}


def _size(spec: Document, of_template: int, note: Note) -> tuple[int, int]:
    """Return the number of workers, and processing units of each (0 if it is unknown)."""
    if spec.get("replicas") is not None:
        return int(spec["replicas"]), of_template
    total = spec.get("processingUnits") or spec.get("gpus")
    if total is None:
        raise LaunchError("spec: one of replicas, processingUnits or gpus must say how large the job is")
    each = spec.get("processingUnitsPerNode") or spec.get("gpusPerNode")
    if each is None:
        each = 1
        note("processingUnitsPerNode was not given: 1, unless your operator was started with another number")
    each = min(int(each), int(total))
    if total % each:
        raise LaunchError(f"{total} processing units cannot be divided into workers with {each} each")
    return int(total) // each, each


def _order_containers(pod: Document, main: str, note: Note) -> None:
    """Put the main container first, where v2beta1 expects it."""
    names = [container.get("name") for container in pod["containers"]]
    if main in names[1:]:
        pod["containers"].insert(0, pod["containers"].pop(names.index(main)))
        note(f"mainContainer {main} is now the first container")


def _convert_restart_policy(kind: str, replica: Document, note: Note) -> None:
    of_pod = replica["template"]["spec"].pop("restartPolicy", None)
    given = replica.get("restartPolicy") or of_pod
    replica["restartPolicy"] = given if given in ("Never", "OnFailure") else "Never"
    if given and given != replica["restartPolicy"]:
        note(f"{kind}.restartPolicy {given} is not known any more: Never")


def _command(container: Document) -> list[str]:
    return [str(word) for part in ("command", "args") for word in container.get(part) or []]


def _convert_launcher(container: Document, note: Note) -> None:
    words, env = _command(container), container.get("env") or []
    if any("kubexec.sh" in word for word in words) or any(item.get("name") == _AGENT for item in env):
        note("/etc/mpi/kubexec.sh is gone: what named it as plm_rsh_agent has been removed")
    for part in ("command", "args"):
        if container.get(part):
            kept = _without_agent(container[part])
            container[part] = [f"-{word}" if _ONE_DASH.fullmatch(word) else word for word in kept]
    if "env" in container:
        container["env"] = [item for item in env if item.get("name") != _AGENT]
    if words and words[0].endswith(("mpirun", "mpiexec")):
        note(
            f"the launcher's `{words[0]}` is kept, options with one dash now have two, as Open MPI 5 wants. "
            "That does not read the operator's host file by itself and starts all ranks in the launcher: "
            f"write `ringdance mpirun` instead of `{words[0]}`, or `ringdance run COMMAND`"
        )


def _without_agent(words: list[Any]) -> list[Any]:
    """Remove ``-mca plm_rsh_agent /etc/mpi/kubexec.sh``."""
    for at in range(len(words) - 1):
        if str(words[at]).lstrip("-") == "mca" and words[at + 1] == "plm_rsh_agent":
            return words[:at] + _without_agent(words[at + 3 :])
    return words


def _convert_worker(container: Document, note: Note) -> None:
    """Remove a worker's command, so that the operator gives it ``/usr/sbin/sshd -De``."""
    words = _command(container)
    if words and not any("sshd" in word for word in words):
        container.pop("command", None)
        container.pop("args", None)
        if any(words):
            note(f"the worker's command {' '.join(words)!r} has been removed: it must run sshd now")


def _ssh_directory(spec: Document, note: Note) -> str:
    pods = [replica["template"]["spec"] for replica in spec["mpiReplicaSpecs"].values()]
    contexts = [part.get("securityContext") or {} for pod in pods for part in (pod, pod["containers"][0])]
    users = sorted({context["runAsUser"] for context in contexts if context.get("runAsUser")})
    if not users:
        return "/root/.ssh"
    note(
        f"the pods run as user {', '.join(map(str, users))}: sshAuthMountPath {SSH_DIRECTORY} must be `.ssh` "
        "in that user's home, and sshd must listen above port 1024"
    )
    return SSH_DIRECTORY
