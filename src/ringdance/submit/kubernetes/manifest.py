"""Manifests for Kubernetes: an MPIJob (v2beta1) or a TrainJob (v1alpha1) as plain data.

Both operators start a launcher pod, which runs the command, and worker pods, in which an ssh daemon waits.
Everything in a pod runs without root and without privileges, so that the manifests pass the
"restricted" Pod Security Standard; the daemon therefore listens on a port above 1024.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.environment import is_secret

SSH_PORT = 2222
USER = 1000
SSH_FOLDER = "/home/mpiuser/.ssh"
GPU = "nvidia.com/gpu"
KINDS = ("MPIJob", "TrainJob")
IMPLEMENTATIONS = ("OpenMPI", "MPICH", "Intel")

Document = dict[str, Any]

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Volume:
    """A place for files that all pods of the job see.

    Attributes:
        source: as in a pod's ``volumes``, without the name.
        path: where it is mounted.
        read_only: whether the pods may only read.
    """

    source: Mapping[str, Any]
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class JobRequest:
    """What a manifest is written for.

    Attributes:
        name: of the job; a DNS label.
        image: container image of all pods; it holds ringdance, the script's packages, ssh and sshd.
        command: what each rank runs.
        workers: number of worker pods.
        slots: ranks on each worker.
        gpus: GPUs of each worker.
        cpus, memory: resources of each worker, such as "8" and "32Gi"; "" leaves them open.
        shm: size of /dev/shm in each pod; the ranks of a pod exchange gradients there.
        volumes: mounted in all pods.
        env: variables of the ranks.
        secret_env: variables whose values are taken from Secrets: name to (Secret, key).
        namespace: "" for the one of kubectl's context.
        mpi: one of :data:`IMPLEMENTATIONS`.
        retries: how often the launcher is started again after a failure.
        limit: seconds after which the job is ended; None for no limit.
        keep: seconds for which the ended job and its log stay.
        node_selector: labels that the workers' nodes must have.
        pull_secrets: names of Secrets for the image's registry.
        service_account: "" for the namespace's default.
        launcher_memory: of the launcher pod, which computes nothing.
    """

    name: str
    image: str
    command: Sequence[str]
    workers: int = 2
    slots: int = 1
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shm: str = "2Gi"
    volumes: Sequence[Volume] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    namespace: str = ""
    mpi: str = "OpenMPI"
    retries: int = 0
    limit: int | None = None
    keep: int = 7 * 86400
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: Sequence[str] = ()
    service_account: str = ""
    launcher_memory: str = "1Gi"

    def check(self) -> None:
        """Look for mistakes that the cluster would tell of late, or never.

        Raises:
            LaunchError: what is wrong, and what to write instead.
        """
        longest = f"{self.name}-worker-{max(self.workers - 1, 0)}"
        if not _LABEL.fullmatch(self.name) or len(longest) > 63:
            raise LaunchError(
                f"--name {self.name}: it must be a DNS label: lower-case letters, digits and '-', beginning "
                f"with a letter, and the last worker's name {longest!r} at most 63 characters"
            )
        if not self.command:
            raise LaunchError("what is to be run? For example: -- python train.py")
        for option, number, least in (
            ("workers", self.workers, 1), ("slots", self.slots, 1), ("gpus", self.gpus, 0),
            ("retries", self.retries, 0), ("keep", self.keep, 0),
        ):  # fmt: skip
            if number < least:
                raise LaunchError(f"--{option} {number}: it must be {least} or more")
        sizes = {
            "cpus": self.cpus,
            "memory": self.memory,
            "shm": self.shm,
            "launcher-memory": self.launcher_memory,
        }
        for option, text in sizes.items():
            if text and not _QUANTITY.fullmatch(text):
                raise LaunchError(
                    f"--{option} {text}: it is no quantity of Kubernetes, such as 4, 500m or 16Gi"
                )
        if self.mpi not in IMPLEMENTATIONS:
            raise LaunchError(f"--mpi {self.mpi}: it must be one of {', '.join(IMPLEMENTATIONS)}")
        self._check_variables()

    def _check_variables(self) -> None:
        for name in (*self.env, *self.secret_env):
            if not _VARIABLE.fullmatch(name):
                raise LaunchError(f"{name!r} cannot be the name of an environment variable")
        for name, value in self.env.items():
            if is_secret(name, value):
                raise LaunchError(
                    f"-x {name}: that looks like a secret, and a manifest can be read by many. Put it into a "
                    f"Secret (kubectl create secret generic NAME --from-literal={name.lower()}=...) and give "
                    f"--secret-env {name}=NAME/{name.lower()}"
                )

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.workers * self.slots


def manifest(request: JobRequest, kind: str = "MPIJob") -> list[Document]:
    """The documents to submit, in their order.

    Raises:
        LaunchError: the request cannot be met; says what to change.
    """
    request.check()
    if kind == "MPIJob":
        return [_mpijob(request)]
    if kind == "TrainJob":
        if request.mpi != "OpenMPI":
            raise LaunchError(f"--mpi {request.mpi}: TrainJobs know OpenMPI only; write an MPIJob instead")
        return [_runtime(request), _trainjob(request)]
    raise LaunchError(f"--kind {kind}: it must be one of {', '.join(KINDS)}")


def _mpijob(request: JobRequest) -> Document:
    policy: Document = {
        "cleanPodPolicy": "Running",  # the workers go when the launcher has ended; its pod and log stay
        "ttlSecondsAfterFinished": request.keep,
        "backoffLimit": request.retries,
    }
    if request.limit is not None:
        policy["activeDeadlineSeconds"] = request.limit
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(request),
        "spec": {
            "slotsPerWorker": request.slots,
            "mpiImplementation": request.mpi,
            "sshAuthMountPath": SSH_FOLDER,
            # Else the launcher fails a few times before the workers' names exist.
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": _replica(1, _launcher_pod(request, "launcher")),
                "Worker": _replica(request.workers, _worker_pod(request, "worker")),
            },
        },
    }


def _replica(number: int, pod: Document) -> Document:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": pod}}


def _runtime(request: JobRequest) -> Document:
    """What a TrainJob refers to: here lie the pods, since the cluster's own runtimes bring other images."""
    # The names `node` and `launcher` are the operator's, also that of the containers.
    node = {"name": "node", "template": {"spec": _batch(_worker_pod(request, "node"))}}
    launcher = {
        "name": "launcher",
        "dependsOn": [{"name": "node", "status": "Ready"}],
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _batch(_launcher_pod(request, "node"), request.retries),
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(request),
        "spec": {
            "mlPolicy": {
                "numNodes": request.workers,
                "mpi": {
                    "numProcPerNode": request.slots,
                    "mpiImplementation": "OpenMPI",
                    "sshAuthMountPath": SSH_FOLDER,
                    "runLauncherAsNode": False,
                },
            },
            "template": {
                "spec": {
                    "network": {"publishNotReadyAddresses": True},
                    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                    "ttlSecondsAfterFinished": request.keep,
                    "replicatedJobs": [node, launcher],
                }
            },
        },
    }


def _batch(pod: Document, retries: int = 0) -> Document:
    return {"backoffLimit": retries, "template": {"spec": {**pod, "restartPolicy": "Never"}}}


def _trainjob(request: JobRequest) -> Document:
    spec: Document = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": request.name,
        },
        "trainer": {
            "numNodes": request.workers,
            "numProcPerNode": request.slots,
            "command": _launch(request),
        },
    }
    if request.limit is not None:
        spec["activeDeadlineSeconds"] = request.limit
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": spec,
    }


def _metadata(request: JobRequest) -> Document:
    found: Document = {"name": request.name, "labels": {"app.kubernetes.io/managed-by": "ringdance"}}
    if request.namespace:
        found["namespace"] = request.namespace
    return found


# --- pods ------------------------------------------------------------------------------------------


def _launch(request: JobRequest) -> list[str]:
    """The launcher's command: hosts and slots it reads from what the operator has put into its pod."""
    # ssh passes no environment on: the launcher does, by name.
    exports = [word for name in (*request.env, *request.secret_env) for word in ("-x", name)]
    return ["ringdance", "run", "-np", str(request.ranks), *exports, "--", *request.command]


def _launcher_pod(request: JobRequest, container: str) -> Document:
    # Requests only as far as the memory: it starts and listens, and has no GPU.
    resources = {"requests": {"cpu": "500m"}, "limits": {"memory": request.launcher_memory}}
    return _pod(request, container, _launch(request), resources, _environment(request))


def _worker_pod(request: JobRequest, container: str) -> Document:
    limits: dict[str, Any] = {}
    if request.cpus:
        limits["cpu"] = request.cpus
    if request.memory:
        limits["memory"] = request.memory
    if request.gpus:
        limits[GPU] = request.gpus
    pod = _pod(request, container, sshd(), {"limits": limits} if limits else {}, [])
    ready = {"tcpSocket": {"port": SSH_PORT}, "initialDelaySeconds": 1, "periodSeconds": 2}
    pod["containers"][0] |= {"ports": [{"name": "ssh", "containerPort": SSH_PORT}], "readinessProbe": ready}
    if request.node_selector:
        pod["nodeSelector"] = dict(request.node_selector)
    return pod


def sshd(folder: str = SSH_FOLDER, port: int = SSH_PORT) -> list[str]:
    """An ssh daemon for one user that is not root, with the key pair that the operator puts into `folder`.

    The job's own key is also the host's: the launcher's side can tell that it speaks with its own workers.
    """
    settings = (
        f"HostKey={folder}/id_rsa",
        f"AuthorizedKeysFile={folder}/authorized_keys",
        "StrictModes=no",  # the files of a mounted Secret belong to root and its group
        "PasswordAuthentication=no",
        "KbdInteractiveAuthentication=no",
        "UsePAM=no",  # it needs root
        "PidFile=none",
    )
    return ["/usr/sbin/sshd", "-De", "-p", str(port), *(word for text in settings for word in ("-o", text))]


def _pod(
    request: JobRequest, container: str, command: Sequence[str], resources: Document, env: list[Document]
) -> Document:
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm}}]
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(request.volumes):
        volumes.append({"name": f"volume-{number}", **volume.source})
        mounts.append(
            {"name": f"volume-{number}", "mountPath": volume.path}
            | ({"readOnly": True} if volume.read_only else {})
        )
    main: Document = {
        "name": container,
        "image": request.image,
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if resources:
        main["resources"] = resources
    if env:
        main["env"] = env
    pod: Document = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,  # the Secret with the key, and volumes, can be read by it
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": volumes,
    }
    if request.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in request.pull_secrets]
    if request.service_account:
        pod["serviceAccountName"] = request.service_account
    return pod


def _environment(request: JobRequest) -> list[Document]:
    env: list[Document] = [{"name": name, "value": value} for name, value in request.env.items()]
    for name, (secret, key) in request.secret_env.items():
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return env


def parse_volume(text: str) -> Volume:
    """A volume as written on the command line: ``KIND:WHAT:PATH``, with ``:ro`` behind it if read-only.

    ``pvc:CLAIM:/data``, ``nfs:SERVER:/EXPORT:/data``, ``host:/FOLDER:/data``, ``configmap:NAME:/etc/x``,
    ``secret:NAME:/etc/x``, ``empty:SIZE:/scratch``.

    Raises:
        LaunchError: it has another form.
    """
    words = text.split(":")
    read_only = words[-1] == "ro"
    match words[: len(words) - read_only]:
        case ["pvc", claim, path] if claim:
            source: Document = {"persistentVolumeClaim": {"claimName": claim}}
        case ["nfs", server, folder, path] if server and folder.startswith("/"):
            source = {"nfs": {"server": server, "path": folder}}
        case ["host", folder, path] if folder.startswith("/"):
            source = {"hostPath": {"path": folder}}
        case ["configmap", name, path] if name:
            source = {"configMap": {"name": name}}
        case ["secret", name, path] if name:
            source = {"secret": {"secretName": name}}
        case ["empty", size, path] if not size or _QUANTITY.fullmatch(size):
            source = {"emptyDir": {"sizeLimit": size} if size else {}}
        case _:
            path = ""
            source = {}
    if not path.startswith("/"):
        raise LaunchError(
            f"--volume {text}: write pvc:CLAIM:/PATH, nfs:SERVER:/EXPORT:/PATH, host:/FOLDER:/PATH, "
            "configmap:NAME:/PATH, secret:NAME:/PATH or empty:SIZE:/PATH; :ro behind it for reading only"
        )
    return Volume(source, path, read_only)
