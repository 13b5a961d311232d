"""Old MPIJobs (v1alpha1, v1alpha2, v1) brought up to v2beta1, with a note on everything that was decided.

Before v2beta1 the launcher reached its workers by ``kubectl exec``, and these only slept; since then it does
so by ssh, and they run an ssh daemon. v1alpha1 had one pod template for both.
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
_OF_THE_SERVER = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid")
_ONE_DASH = re.compile(
    r"-(bind-to|map-by|rank-by|mca|output-filename|report-bindings|tag-output|hostfile|host)"
)
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"

Note = Callable[[str], None]


def convert(document: Document) -> tuple[Document, list[str]]:
    """An MPIJob as one of v2beta1, and what a person should know of it.

    Args:
        document: an MPIJob of any version; it is not changed.

    Raises:
        LaunchError: it is no MPIJob, or says too little to be converted.
    """
    group, _, version = str(document.get("apiVersion", "")).partition("/")
    if group != "kubeflow.org" or document.get("kind") != "MPIJob":
        raise LaunchError(
            f"this is no MPIJob of kubeflow.org, but {document.get('apiVersion')}, {document.get('kind')}"
        )
    if version == "v2beta1":
        return copy.deepcopy(document), ["it has version v2beta1 already and is unchanged"]
    if version not in OLD:
        raise LaunchError(f"MPIJob of version {version!r}: known are {', '.join(OLD)} and v2beta1")
    notes: list[str] = []
    old = copy.deepcopy(document)
    spec = old.get("spec") or {}
    new = _from_v1alpha1(spec, notes.append) if version == "v1alpha1" else _from_v1(spec, notes.append)
    for kind in ("Launcher", "Worker"):
        replica = new["mpiReplicaSpecs"].get(kind)
        if not replica or not replica.get("template", {}).get("spec", {}).get("containers"):
            raise LaunchError(f"spec.mpiReplicaSpecs.{kind}: it is missing, or has no container")
        _order_containers(replica["template"]["spec"], str(spec.get("mainContainer") or ""), notes.append)
        _restart_policy(kind, replica, notes.append)
    _launcher(new["mpiReplicaSpecs"]["Launcher"]["template"]["spec"], notes.append)
    _worker(new["mpiReplicaSpecs"]["Worker"]["template"]["spec"], notes.append)
    new["sshAuthMountPath"] = _ssh_folder(new, notes.append)
    notes.append(
        "the launcher now uses ssh: the image must have sshd and an ssh client that trusts its workers' keys"
    )
    metadata = {k: v for k, v in (old.get("metadata") or {}).items() if k not in _OF_THE_SERVER}
    (metadata.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": new,
    }, notes


def _run_policy(spec: Document) -> Document:
    given = {name: spec[name] for name in _RUN_POLICY if spec.get(name) is not None}
    within = spec.get("runPolicy") or {}
    return {**given, **{name: within[name] for name in _RUN_POLICY if within.get(name) is not None}}


def _from_v1(spec: Document, note: Note) -> Document:
    policy = _run_policy(spec)
    policy.setdefault("cleanPodPolicy", "None")
    if policy["cleanPodPolicy"] == "None":
        note("runPolicy.cleanPodPolicy is None: the workers go on after the end; Running would remove them")
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


def _from_v1alpha1(spec: Document, note: Note) -> Document:
    template = spec.get("template") or {}
    if not (template.get("spec") or {}).get("containers"):
        raise LaunchError("spec.template: it is missing, or has no container")
    resource = spec.get("processingResourceType") or GPU
    resource = {"gpu": GPU}.get(resource, resource)
    workers, units = _size(spec, template, resource, note)
    launcher, worker = template, copy.deepcopy(template)
    _limit(launcher["spec"]["containers"][0], resource, None)
    if units:
        _limit(worker["spec"]["containers"][0], resource, units)
    for container in worker["spec"]["containers"][:1]:  # the command is the launcher's
        container.pop("command", None)
        container.pop("args", None)
    if spec.get("launcherOnMaster"):
        launcher["spec"].setdefault("nodeSelector", {})[_CONTROL_PLANE] = ""
        launcher["spec"].setdefault("tolerations", []).append(
            {"key": _CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"}
        )
        note(f"launcherOnMaster: the launcher's nodeSelector is {_CONTROL_PLANE}")
    slots = spec.get("slotsPerWorker") or units or 1
    note(f"{workers} workers with {slots} slots each, from the single template of v1alpha1")
    policy = _run_policy(spec)
    policy.setdefault("cleanPodPolicy", "Running")  # v1alpha1 always removed the workers
    return {
        "slotsPerWorker": slots,
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": launcher},
            "Worker": {"replicas": workers, "template": worker},
        },
    }


def _size(spec: Document, template: Document, resource: str, note: Note) -> tuple[int, int]:
    """Workers, and processing units for each (0 if the template names none)."""
    limits = (template["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    if spec.get("replicas") is not None:
        return int(spec["replicas"]), int(limits.get(resource, 0))
    total = spec.get("processingUnits") or spec.get("gpus")
    if total is None:
        raise LaunchError("spec: one of replicas, processingUnits or gpus must say how large the job is")
    each = spec.get("processingUnitsPerNode") or spec.get("gpusPerNode")
    if each is None:
        each = 1
        note("processingUnitsPerNode was not given: 1, unless your operator was started with another number")
    if total < each:
        return 1, int(total)
    if total % each:
        raise LaunchError(f"{total} processing units cannot be divided into workers with {each} each")
    return int(total) // int(each), int(each)


def _limit(container: Document, resource: str, units: int | None) -> None:
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        (resources.get(part) or {}).pop(resource, None)
    if units:
        resources["limits"] = {**(resources.get("limits") or {}), resource: units}
    resources = {name: value for name, value in resources.items() if value}
    container.pop("resources", None)
    if resources:
        container["resources"] = resources


def _order_containers(pod: Document, main: str, note: Note) -> None:
    """v2beta1 takes the first container for the main one."""
    names = [container.get("name") for container in pod["containers"]]
    if main in names[1:]:
        pod["containers"].insert(0, pod["containers"].pop(names.index(main)))
        note(f"mainContainer {main} is now the first container")


def _restart_policy(kind: str, replica: Document, note: Note) -> None:
    within = replica["template"]["spec"].pop("restartPolicy", None)
    given = replica.get("restartPolicy") or within
    replica["restartPolicy"] = given if given in ("Never", "OnFailure") else "Never"
    if given and given != replica["restartPolicy"]:
        note(f"{kind}.restartPolicy {given} is not known any more: Never")


def _launcher(pod: Document, note: Note) -> None:
    container = pod["containers"][0]
    words: list[str] = [*(container.get("command") or []), *(container.get("args") or [])]
    if any("kubexec.sh" in word for word in words) or any(
        item.get("name") == "OMPI_MCA_plm_rsh_agent" for item in container.get("env") or []
    ):
        note("/etc/mpi/kubexec.sh is gone: what named it as plm_rsh_agent has been removed")
    for part in ("command", "args"):
        if container.get(part):
            container[part] = _without_agent(container[part])
            container[part] = [f"-{word}" if _ONE_DASH.fullmatch(word) else word for word in container[part]]
    if "env" in container:
        container["env"] = [i for i in container["env"] if i.get("name") != "OMPI_MCA_plm_rsh_agent"]
    first = next(iter(words), "")
    if first.endswith(("mpirun", "mpiexec")):
        note(
            f"the launcher's `{first}` is kept, options with one dash now have two, as Open MPI 5 wants; "
            "`ringdance run COMMAND` finds hosts and slots by itself"
        )


def _without_agent(words: list[Any]) -> list[Any]:
    """The words without ``-mca plm_rsh_agent /etc/mpi/kubexec.sh``."""
    kept: list[Any] = []
    rest = list(words)
    while rest:
        if str(rest[0]).lstrip("-") == "mca" and rest[1:2] == ["plm_rsh_agent"]:
            del rest[:3]
        else:
            kept.append(rest.pop(0))
    return kept


def _worker(pod: Document, note: Note) -> None:
    """Without a command of its own a worker gets ``/usr/sbin/sshd -De`` from the operator."""
    container = pod["containers"][0]
    words = [str(word) for word in [*(container.get("command") or []), *(container.get("args") or [])]]
    if words and not any("sshd" in word for word in words):
        container.pop("command", None)
        container.pop("args", None)
        if any(words):
            note(f"the worker's command {' '.join(words)!r} has been removed: it must run sshd now")


def _ssh_folder(spec: Document, note: Note) -> str:
    users = set()
    for replica in spec["mpiReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        for context in (pod.get("securityContext"), pod["containers"][0].get("securityContext")):
            if (context or {}).get("runAsUser"):
                users.add(context["runAsUser"])
    if not users:
        return "/root/.ssh"
    note(
        f"the pods run as user {', '.join(map(str, sorted(users)))}: sshAuthMountPath {SSH_DIRECTORY} must "
        "be `.ssh` in that user's home, and sshd must listen above port 1024"
    )
    return SSH_DIRECTORY
