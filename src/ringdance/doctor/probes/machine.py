"""Who the machine is: name, system, user, container."""

from __future__ import annotations

import getpass
import os
import platform
from typing import Any

from ringdance.doctor.probes import files
from ringdance.doctor.registry import Wanted


def look(wanted: Wanted) -> dict[str, Any]:
    """Name, identity, operating system, user, container, the folder of the command."""
    system = os.uname()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return {
        "name": system.nodename,
        "identity": f"{system.nodename} {files.text('/proc/sys/kernel/random/boot_id')}",
        "system": f"{system.sysname} {system.release}",
        "architecture": system.machine,
        "libc": " ".join(platform.libc_ver()),
        "user": user,
        "root": os.getuid() == 0,
        "container": container(),
        "here": {"path": wanted.here, "exists": not wanted.here or os.path.isdir(wanted.here)},
    }


def container() -> str:
    """ "kubernetes", "docker", "podman", "apptainer" or ""."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    return "docker" if os.path.exists("/.dockerenv") else ""
