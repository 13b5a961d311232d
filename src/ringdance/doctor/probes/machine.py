"""System, user and container of the machine."""

from __future__ import annotations

import getpass
import os
import platform
from typing import Any

from ringdance.doctor.check import Usage


def collect(usage: Usage) -> dict[str, Any]:
    """Operating system, user, container, the command's directory."""
    system = os.uname()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return {
        "system": f"{system.sysname} {system.release}",
        "architecture": system.machine,
        "libc": " ".join(platform.libc_ver()),
        "user": user,
        "container": container(),
        "cwd": {"path": usage.cwd, "exists": not usage.cwd or os.path.isdir(usage.cwd)},
    }


def container() -> str:
    """Return "kubernetes", "docker", "podman", "apptainer" or ""."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    return "docker" if os.path.exists("/.dockerenv") else ""
