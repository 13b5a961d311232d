"""``ringdance hosts trust``: learn the keys by which hosts prove who they are; never blindly.

The keys come over the network, so they are shown as fingerprints to be compared with what the hosts' owner
says (there: ``ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub``), and written only when that is confirmed. A
key that differs from a known one is never written.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringdance.cluster.hostfile import NAME
from ringdance.errors import LaunchError
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.system.machine import in_home

_ORDER = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")


@dataclass
class Keys:
    """What is known and what was found of a host.

    Attributes:
        host: as given.
        name: how ssh's file of known hosts calls it.
        file: that file.
        new: keys that are not known: their kind and the key itself.
        known: kinds of those that are known and the same.
        changed: kinds of those that differ from a known one.
        problem: why nothing was found, or "".
    """

    host: str
    name: str = ""
    file: str = ""
    new: dict[str, str] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    problem: str = ""


def look(hosts: Sequence[str], reach: RemoteShell, timeout: float) -> list[Keys]:
    """The keys of hosts, all asked at once.

    Raises:
        LaunchError: something is no host's name, or ssh's programs are not here.
    """
    for host in hosts:
        if not NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not the name of a host: letters, digits, dots and dashes")
    found = {host: Keys(host) for host in hosts}

    def one(keys: Keys) -> None:
        try:
            _look(keys, reach, timeout)
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            keys.problem = str(error)

    threads = [threading.Thread(target=one, args=(keys,), daemon=True) for keys in found.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(found.values())


def _look(keys: Keys, reach: RemoteShell, timeout: float) -> None:
    line = ["ssh", "-G", *reach.arguments, *(["-p", str(reach.port)] if reach.port else []), "--", keys.host]
    settings: dict[str, str] = {}
    for text in _output(line, 10.0).splitlines():
        name, _, value = text.partition(" ")
        settings.setdefault(name, value)
    address, port = settings.get("hostname", keys.host), settings.get("port", "22")
    alias = settings.get("hostkeyalias", "").replace("none", "")
    keys.name = alias or (address if port == "22" else f"[{address}]:{port}")
    file = settings.get("userknownhostsfile", "~/.ssh/known_hosts").split()[0]
    try:
        keys.file = in_home(file)
    except FileNotFoundError as error:
        keys.problem = f"{file}: {error.strerror}"
        return
    scan = ["ssh-keyscan", "-T", str(max(1, int(timeout))), "-p", port, "--", address]
    offered = dict(_keys(_output(scan, timeout + 10.0)))
    if not offered:
        keys.problem = f"no ssh answers at {address}, port {port}"
        return
    known: dict[str, set[str]] = {}
    if os.path.exists(keys.file):
        for kind, key in _keys(_output(["ssh-keygen", "-F", keys.name, "-f", keys.file], 10.0)):
            known.setdefault(kind, set()).add(key)
    for kind, key in sorted(offered.items(), key=lambda entry: _rank(entry[0])):
        if key in known.get(kind, ()):
            keys.known.append(kind)
        elif kind in known:
            keys.changed.append(kind)
        else:
            keys.new[kind] = key


def _rank(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _output(line: Sequence[str], seconds: float) -> str:
    done = subprocess.run(
        line, capture_output=True, text=True, errors="replace", check=False, timeout=seconds,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout


def _keys(text: str) -> list[tuple[str, str]]:
    """Kind and key of each line of a file of known hosts, or of ssh-keyscan's output."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(("#", "@")) or len(words) < 3:
            continue
        base64.b64decode(words[2], validate=True)
        found.append((words[1], words[2]))
    return found


def fingerprint(key: str) -> str:
    """As ssh shows it: ``SHA256:...``."""
    digest = hashlib.sha256(base64.b64decode(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def learn(found: Sequence[Keys]) -> int:
    """Write the new keys; how many there were. The file and its folder are private.

    Raises:
        LaunchError: a file cannot be written.
    """
    count = 0
    for keys in found:
        if not keys.new:
            continue
        lines = "".join(f"{keys.name} {kind} {key}\n" for kind, key in keys.new.items())
        try:
            os.makedirs(os.path.dirname(keys.file), mode=0o700, exist_ok=True)
            descriptor = os.open(keys.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                size = os.fstat(descriptor).st_size
                broken = size and os.pread(descriptor, 1, size - 1) != b"\n"
                file.write((("\n" if broken else "") + lines).encode())
        except OSError as error:
            raise LaunchError(f"{keys.file}: {error.strerror}") from None
        count += len(keys.new)
    return count
