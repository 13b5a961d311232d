"""Collect facts about a machine for planning jobs: its cores, devices and networks.

Standard library only: agents run it without ``site``.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import platform
import re
import resource
import socket
import struct
import sys
import uuid
from typing import Any

from . import linux

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_FILE_BYTES = 32 << 20


def facts() -> dict[str, Any]:
    """Return the fields of ``HostFacts`` for this machine."""
    return {
        "name": os.uname().nodename,
        "identity": identity(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "version": own_version(),
        "cores": linux.usable_cores(),
        "devices": devices(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "networks": networks(),
        "reached": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "shared_memory": linux.shared_memory(),
        "infiniband": bool(glob.glob("/sys/class/infiniband/*")),
    }


def nearest(path: str) -> str:
    """Return the absolute path ``path`` if it exists, otherwise its nearest existing parent."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def in_home(path: str) -> str:
    """Expand ``~`` at the start of a path. Use ``/`` if this user's home directory is unknown.

    Raises:
        FileNotFoundError: ``~NAME`` names an unknown user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and expanded[1:2] not in ("", "/"):
        raise FileNotFoundError(errno.ENOENT, f"no such user on {os.uname().nodename}", path)
    return os.path.join("/", expanded[2:]) if expanded.startswith("~") else expanded


def identity() -> str:
    """Return a string that identifies this machine or container."""
    boot = linux.text("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename} {boot or uuid.getnode()}"


def own_version() -> str:
    """Return this package's ``__version__`` without importing it."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    text = linux.text(os.path.join(package, "__init__.py"))
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return match[1] if match else "unknown"


def devices() -> list[str]:
    """Return the names of the GPUs. Inside a container, only its own GPUs have device files."""
    texts = map(linux.text, sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")))
    gpus = [dict(re.findall(r"^(Model|Device Minor):\s*(.+?)\s*$", text, re.MULTILINE)) for text in texts]
    names = {gpu.get("Device Minor", str(n)): gpu.get("Model", "NVIDIA GPU") for n, gpu in enumerate(gpus)}
    # These files do not exist until the devices are first used after a boot.
    files = [path.removeprefix("/dev/nvidia") for path in glob.glob("/dev/nvidia[0-9]*")]
    return [names.get(minor, "NVIDIA GPU") for minor in files or names]


def problem() -> str:
    """Return why this machine cannot run any job, or an empty string if it can."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory has been removed. Change to an existing directory."
    if linux.LINUX and not os.path.exists("/proc/self/stat"):
        return "/proc is not mounted, but MPI and the launcher need it. Run `mount -t proc proc /proc`."
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= limit < _FILE_BYTES:
        most = f"files are limited to {limit >> 10} KiB, including files in shared memory (ulimit -f)"
        return f"{most}, but MPI needs {_FILE_BYTES >> 20} MiB. Run `ulimit -f unlimited`."
    return ""


def networks() -> list[tuple[str, str, int]]:
    """Return each active interface's name, address and prefix length, IPv4 first, without link-local ones.

    Linux only. It does not use psutil, which an agent without ``site`` cannot import.
    """
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(sock, _SIOCGIFNETMASK, request)[20:24]
            except OSError:  # no IPv4 address, or not Linux
                continue
            if address[0] != 127:
                result.append((name, socket.inet_ntoa(address), int.from_bytes(mask, "big").bit_count()))
    for line in linux.text("/proc/net/if_inet6").splitlines():
        digits, _, bits, scope, _, name = line.split()
        if scope == "00":  # global, or unique local (fd00::/8)
            result.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), int(bits, 16)))
    return result
