"""The description of a Kubernetes job, created from command-line options or in code."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.remote.environment import is_secret
from ringdance.launch.spec import parse_exports, refuse_launcher
from ringdance.submit.options import check_options, option, pairs

Document = dict[str, Any]

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?"
_SIZE: Any = {
    "metavar": "SIZE", "pattern": _QUANTITY, "form": "must be a Kubernetes quantity, such as 4, 500m or 16Gi",
}  # fmt: skip


@dataclass(frozen=True)
class Volume:
    """A volume that all pods of the job mount.

    Attributes:
        source: Entry for the ``volumes`` list of a pod, without the name.
        path: Mount point.
        read_only: If True, mount the volume read-only.
    """

    source: Mapping[str, Any]
    path: str
    read_only: bool = False


def parse_volume(text: str) -> Volume:
    """Parse a volume from the command line: ``KIND:WHAT:PATH``, followed by ``:ro`` for a read-only mount.

    Examples: ``pvc:CLAIM:/data``, ``nfs:SERVER:/EXPORT:/data``, ``host:/DIR:/data``, ``secret:NAME:/etc/x``.

    Raises:
        LaunchError: The text does not have this form.
    """
    words = text.split(":")
    read_only = words[-1] == "ro"
    match words[: len(words) - read_only]:
        case ["pvc", claim, path] if claim:
            source: Document = {"persistentVolumeClaim": {"claimName": claim}}
        case ["nfs", server, export, path] if server and export.startswith("/"):
            source = {"nfs": {"server": server, "path": export}}
        case ["host", directory, path] if directory.startswith("/"):
            source = {"hostPath": {"path": directory}}
        case ["secret", name, path] if name:
            source = {"secret": {"secretName": name}}
        case _:
            source, path = {}, ""
    if not path.startswith("/"):
        raise LaunchError(
            f"--volume {text}: expected pvc:CLAIM:/PATH, nfs:SERVER:/EXPORT:/PATH, host:/DIR:/PATH or "
            "secret:NAME:/PATH. Append :ro to mount it read-only."
        )
    return Volume(source, path, read_only)


def literal(text: str) -> str:
    """Escape each $ as $$, because Kubernetes expands $(NAME) in commands and environment variables."""
    return text.replace("$", "$$")


def _secrets(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    keys = {}
    for name, text in pairs("--secret-env", texts).items():
        secret, slash, key = text.partition("/")
        if not (secret and slash and key):
            raise LaunchError(f"--secret-env {name}={text}: expected {name}=SECRET/KEY")
        keys[name] = secret, key
    return keys


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job and the requirements for its pods. See Note [Options from fields].

    All pods use the same image. ``secret_env`` maps each environment variable to the Secret and the key
    that contain its value.
    """

    kind: str = option("job type (default: MPIJob)", "MPIJob", choices=("MPIJob", "TrainJob"))
    name: str = option("name of the job", "train")
    image: str = option("container image that contains ringdance, your packages, ssh and sshd", "")
    workers: int = option("number of worker pods", 2, minimum=1)
    slots: int | None = option("number of ranks per worker (default: one per GPU, or 1)", type=int, minimum=1)
    gpus: int = option("number of GPUs per worker", 0, minimum=0)
    cpus: str = option("number of cores per worker", "", **{**_SIZE, "metavar": "N"})
    memory: str = option("memory per worker, such as 32Gi", "", **_SIZE)
    shm: str = option("size of /dev/shm, where ranks exchange data", "2Gi", **_SIZE)
    volumes: Sequence[Volume] = option(
        "volume to mount: pvc:CLAIM:/data, nfs:SERVER:/EXPORT:/data, host:/DIR:/data, secret:NAME:/x",
        list, "--volume", metavar="KIND:WHAT:PATH[:ro]",
        convert=lambda texts: [parse_volume(text) for text in texts],
    )  # fmt: skip
    env: Mapping[str, str] = option(
        "environment variable for the ranks", dict, "-x", "--env", metavar="NAME[=VALUE]",
        convert=lambda texts: parse_exports(texts, os.environ),
    )  # fmt: skip
    secret_env: Mapping[str, tuple[str, str]] = option(
        "environment variable for the ranks, from a Secret", dict, metavar="NAME=SECRET/KEY", convert=_secrets
    )
    mpi: str = option("MPI library in the image", "OpenMPI", choices=("OpenMPI", "MPICH", "Intel"))
    retries: int = option("number of times to restart the launcher after a failure", 0, minimum=0)
    limit: int | None = option("stop the job after S seconds (default: no limit)", type=int, metavar="S")
    node_selector: Mapping[str, str] = option(
        "label that the workers' nodes must have", dict, metavar="LABEL=VALUE",
        convert=lambda texts: pairs("--node-selector", texts),
    )  # fmt: skip
    pull_secrets: Sequence[str] = option("Secret for the registry", list, "--pull-secret", metavar="NAME")
    command: Sequence[str] = option("command that each rank runs, after --", (), "COMMAND", nargs="*")

    @property
    def slots_per_worker(self) -> int:
        """Number of ranks per worker."""
        return max(self.gpus, 1) if self.slots is None else self.slots

    @property
    def launch(self) -> list[str]:
        """The launcher's command. The launcher reads hosts and slots from files mounted by the operator."""
        refuse_launcher(self.command)
        # ssh does not forward the environment, so name the variables that the launcher must pass on.
        exports = [word for name in (*self.env, *self.secret_env) for word in ("-x", name)]
        ranks = str(self.workers * self.slots_per_worker)
        return [literal(word) for word in ("ringdance", "run", "-np", ranks, *exports, "--", *self.command)]

    def check(self) -> None:
        """Check for mistakes that the cluster would report late or not at all.

        Raises:
            LaunchError: The request is invalid. The message says how to correct it.
        """
        check_options(self)
        longest = f"{self.name}-worker-{self.workers - 1}"
        if not _LABEL.fullmatch(self.name) or len(longest) > 63:
            raise LaunchError(
                f"--name {self.name}: the name must be a DNS label, which starts with a letter and contains "
                f"only lower-case letters, digits and '-'. The last worker's name, {longest!r}, may have at "
                "most 63 characters"
            )
        if not self.image:
            raise LaunchError("missing --image IMAGE. Specify the container image that all pods use.")
        if not self.command:
            raise LaunchError("missing COMMAND. Example: -- python train.py")
        for name in (*self.env, *self.secret_env):
            if not (name.isidentifier() and name.isascii()):
                raise LaunchError(f"{name!r} is not a valid name for an environment variable")
        for name, value in self.env.items():
            if is_secret(name, value):
                raise LaunchError(
                    f"-x {name} looks like a secret, and many people can read a manifest. Put it into a "
                    f"Secret (kubectl create secret generic NAME --from-literal={name.lower()}=...) and pass "
                    f"--secret-env {name}=NAME/{name.lower()}"
                )
