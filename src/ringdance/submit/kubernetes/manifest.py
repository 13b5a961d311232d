"""Build manifests: an MPIJob (v2beta1) or a TrainJob (v1alpha1) as plain data.

Both operators start a launcher pod, which runs the command, and worker pods, which run an ssh daemon.
All pods run unprivileged as a non-root user, as the "restricted" Pod Security Standard requires. The ssh
daemon therefore listens on a port above 1024.
"""

from __future__ import annotations

from typing import Any

from ringdance.errors import LaunchError
from ringdance.submit.kubernetes.job import Document, JobRequest, literal

SSH_PORT = 2222
USER = 1000
SSH_DIRECTORY = "/home/mpiuser/.ssh"
GPU = "nvidia.com/gpu"
_KEPT_S = 7 * 86400  # how long a finished job and its log are kept
_GRACE_S = 60  # longer than the launcher's --grace, to leave the launcher time to clean up
_WAIT = "while grep -qs host.agent[.]main /proc/[0-9]*/cmdline; do sleep 1; done"
UNTIL_RANKS_END = ["/bin/sh", "-c", _WAIT]
"""Command that delays SIGTERM in a deleted worker. SIGTERM would end ``sshd`` and all ranks immediately."""


def manifest(request: JobRequest) -> list[Document]:
    """Return the documents in the order in which they must be submitted.

    Raises:
        LaunchError: The request is invalid.
    """
    request.check()
    if request.kind == "MPIJob":
        return [_mpijob(request)]
    if request.mpi != "OpenMPI":
        raise LaunchError(f"--mpi {request.mpi}: TrainJobs support only OpenMPI. Create an MPIJob instead.")
    return [_runtime(request), _trainjob(request)]


def _document(request: JobRequest, version: str, kind: str, spec: Document) -> Document:
    metadata = {"name": request.name, "labels": {"app.kubernetes.io/managed-by": "ringdance"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _given(document: Document) -> Document:
    """Return the document without unset entries: None, empty strings and empty collections."""
    return {name: value for name, value in document.items() if value not in (None, "", [], {})}


def _mpijob(request: JobRequest) -> Document:
    policy = {
        "cleanPodPolicy": "Running",  # when the launcher exits, delete the workers but keep its pod and log
        "ttlSecondsAfterFinished": _KEPT_S,
        "backoffLimit": request.retries,
        "activeDeadlineSeconds": request.limit,
    }
    spec = {
        "slotsPerWorker": request.slots_per_worker,
        "mpiImplementation": request.mpi,
        "sshAuthMountPath": SSH_DIRECTORY,
        # Start the launcher last, because it fails until the host names of the workers can be resolved.
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": _given(policy),
        "mpiReplicaSpecs": {
            "Launcher": _replica(1, _launcher_pod(request, "launcher")),
            "Worker": _replica(request.workers, _worker_pod(request, "worker")),
        },
    }
    return _document(request, "kubeflow.org/v2beta1", "MPIJob", spec)


def _replica(number: int, pod: Document) -> Document:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": pod}}


def _runtime(request: JobRequest) -> Document:
    """Return the runtime for a TrainJob, including its pods. The cluster's own runtimes use other images."""
    # The operator requires the names `node` and `launcher`, and containers must be named `node`.
    node = {"name": "node", "template": {"spec": _batch(_worker_pod(request, "node"))}}
    launcher = {
        "name": "launcher",
        "dependsOn": [{"name": "node", "status": "Ready"}],
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": _batch(_launcher_pod(request, "node"), request.retries),
        },
    }
    mpi = {
        "numProcPerNode": request.slots_per_worker,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": SSH_DIRECTORY,
        "runLauncherAsNode": False,
    }
    jobs = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "ttlSecondsAfterFinished": _KEPT_S,
        "replicatedJobs": [node, launcher],
    }
    spec = {"mlPolicy": {"numNodes": request.workers, "mpi": mpi}, "template": {"spec": jobs}}
    return _document(request, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", spec)


def _batch(pod: Document, retries: int = 0) -> Document:
    return {"backoffLimit": retries, "template": {"spec": {**pod, "restartPolicy": "Never"}}}


def _trainjob(request: JobRequest) -> Document:
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": request.name}
    trainer = {
        "numNodes": request.workers,
        "numProcPerNode": request.slots_per_worker,
        "command": request.launch,
    }
    spec = {"runtimeRef": runtime, "trainer": trainer, "activeDeadlineSeconds": request.limit}
    return _document(request, "trainer.kubeflow.org/v1alpha1", "TrainJob", _given(spec))


# --- pods ------------------------------------------------------------------------------------------


def _launcher_pod(request: JobRequest, container: str) -> Document:
    env: list[Document] = [{"name": name, "value": literal(value)} for name, value in request.env.items()]
    for name, (secret, key) in request.secret_env.items():
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    # The launcher only starts the ranks and shows their output, so half a core and no GPU are enough.
    resources = {"requests": {"cpu": "500m"}, "limits": {"memory": f"{1024 + 16 * request.workers}Mi"}}
    return _pod(request, {"name": container, "command": request.launch, "resources": resources, "env": env})


def _worker_pod(request: JobRequest, container: str) -> Document:
    limits = _given({"cpu": request.cpus, "memory": request.memory, GPU: request.gpus or None})
    main = {
        "name": container,
        "command": sshd(),
        "resources": _given({"limits": limits}),
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "initialDelaySeconds": 1, "periodSeconds": 2},
        "lifecycle": {"preStop": {"exec": {"command": UNTIL_RANKS_END}}},
    }
    return _given({**_pod(request, main), "nodeSelector": dict(request.node_selector)})


def sshd(directory: str = SSH_DIRECTORY, port: int = SSH_PORT) -> list[str]:
    """Return the command that starts an ssh daemon as a non-root user.

    The daemon uses the key pair that the operator mounts at ``directory``. The job's key also serves as the
    host key, so that the launcher accepts only its own workers as hosts.
    """
    settings = (
        f"HostKey={directory}/id_rsa",
        f"AuthorizedKeysFile={directory}/authorized_keys",
        "StrictModes=no",  # the files of a mounted Secret belong to root and its group
        "PasswordAuthentication=no",
        "KbdInteractiveAuthentication=no",
        "UsePAM=no",  # PAM requires root
        "PidFile=none",
    )
    return ["/usr/sbin/sshd", "-De", "-p", str(port), *(word for text in settings for word in ("-o", text))]


def _pod(request: JobRequest, main: Document) -> Document:
    """Return an unprivileged pod with the container ``main``. Adds the image and the volumes to it."""
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm}}]
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(request.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, **volume.source})
        read_only: Any = True if volume.read_only else None
        mounts.append(_given({"name": name, "mountPath": volume.path, "readOnly": read_only}))
    container = {
        "name": main["name"],
        "image": request.image,
        **main,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,  # this group may read the Secret with the key, and the volumes
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_given(container)],
        "volumes": volumes,
        "imagePullSecrets": [{"name": name} for name in request.pull_secrets],
        "terminationGracePeriodSeconds": _GRACE_S,
    }
    return _given(pod)
