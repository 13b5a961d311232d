"""Name, system, user and container of the machine; modes of ssh's files."""

from __future__ import annotations

import getpass
import glob
import os
import platform
import stat
from typing import Any

from ringdance.doctor.check import Usage
from ringdance.launch.system import machine


def collect(usage: Usage) -> dict[str, Any]:
    """Name, identity, operating system, user, container, the command's directory, modes of ssh's files."""
    system = os.uname()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return {
        "name": system.nodename,
        "identity": machine.identity(),
        "system": f"{system.sysname} {system.release}",
        "architecture": system.machine,
        "libc": " ".join(platform.libc_ver()),
        "user": user,
        "container": container(),
        "cwd": {"path": usage.cwd, "exists": not usage.cwd or os.path.isdir(usage.cwd)},
        "ssh": _ssh_modes(),
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


def _ssh_modes() -> dict[str, dict[str, int]]:
    """Modes of this user's private keys, and of what sshd requires other users not to write."""
    home = os.path.expanduser("~")
    directory = f"{home}/.ssh"
    keys = {path.removesuffix(".pub") for path in glob.glob(f"{glob.escape(directory)}/*.pub")}
    keys |= {path for path in glob.glob(f"{glob.escape(directory)}/id_*") if not path.endswith(".pub")}
    modes: dict[str, dict[str, int]] = {"keys": {}, "directories": {}}
    for path in sorted(path for path in keys if os.path.isfile(path)):
        status = os.stat(path)
        if status.st_uid == os.getuid():  # ssh accepts any mode of another user's, such as a mounted Secret's
            modes["keys"][path] = stat.S_IMODE(status.st_mode)
    for path in (home, directory, f"{directory}/authorized_keys"):
        if os.path.exists(path):
            modes["directories"][path] = stat.S_IMODE(os.stat(path).st_mode)
    return modes
