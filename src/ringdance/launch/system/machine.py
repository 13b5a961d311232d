"""What a machine is, as far as a plan needs it: standard library only, for it runs on every host."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import platform
import re
import socket
import struct
import sys
import uuid
from typing import Any

from . import linux

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP = 1


def facts() -> dict[str, Any]:
    """This machine's name, Python, cores, devices, networks, version of ours; fields of ``HostFacts``."""
    return {
        "name": os.uname().nodename,
        "identity": identity(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "version": own_version(),
        "cores": linux.usable_cores(),
        "devices": devices(),
        "networks": networks(),
        "reached": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        "shared_memory": shared_memory(),
        "infiniband": bool(glob.glob("/sys/class/infiniband/*")),
    }


def shared_memory() -> int:
    """Free bytes of /dev/shm, -1 if there is none."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return room.f_bavail * room.f_frsize


def in_home(path: str) -> str:
    """`path` with ``~`` replaced by a home directory.

    Raises:
        FileNotFoundError: none is known: HOME is not set and the user is in no list, as often in containers.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise FileNotFoundError(
            errno.ENOENT,
            f"no home directory is known for it on {os.uname().nodename} (HOME is not set, and no entry in "
            "/etc/passwd tells it); set HOME",
            path,
        )
    return found


def home() -> str:
    """The user's home, also without HOME; / for a user whom the system does not know, as in containers."""
    found = os.path.expanduser("~")
    return "/" if found == "~" else found


def identity() -> str:
    """Tells this machine, or container, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{os.uname().nodename} {file.read().strip()}"
    except OSError:
        return f"{os.uname().nodename} {uuid.getnode()}"


def own_version() -> str:
    """``__version__`` of the package that this file lies in."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
            found = re.search(r'^__version__ = "([^"]+)"', file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "unknown"


def devices() -> list[str]:
    """Names of the GPUs, in the driver's order."""
    found = []
    for path in sorted(glob.glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                model = re.search(r"^Model:\s*(.+)$", file.read(), re.MULTILINE)
        except OSError:
            continue
        found.append(model[1].strip() if model else "NVIDIA GPU")
    return found


def problem() -> str:
    """What every job needs and is missing here, or ""."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory has been removed: cd to one that exists"
    if linux.LINUX and not os.path.exists("/proc/self/stat"):
        return "/proc is not mounted, and MPI and the launcher need it: mount -t proc proc /proc"
    if _loopback_down():
        return "the loopback interface is down, and MPI needs it: ip link set lo up"
    return ""


def _loopback_down() -> bool:
    """Whether Linux has one that is down, as in a network namespace that nobody has set up."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("256s", b"lo"))
    except OSError:
        return False
    return not struct.unpack_from("16xh", answer)[0] & _IFF_UP


def networks() -> list[tuple[str, str, int]]:
    """Name, address and prefix length of each interface that is up, IPv4 first; without link-local ones."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(sock.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:  # no address, or not Linux
                continue
            if address[0] != 127:
                bits = int.from_bytes(mask, "big").bit_count()
                found.append((name, socket.inet_ntoa(address), bits))
    return found + _networks6()


def _networks6() -> list[tuple[str, str, int]]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:  # no IPv6, or not Linux
        return []
    return [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)), int(bits, 16))
        for address, _, bits, scope, _, name in lines
        if scope == "00"  # global; fd00::/8 too
    ]
