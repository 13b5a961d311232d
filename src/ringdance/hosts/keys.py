"""Look up the ssh keys of hosts and add them to the known hosts; never blindly.

The keys come over the network, so they are shown as fingerprints to be compared with those on the hosts
themselves (there: ``ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub``), and written only when that is
confirmed. A key that differs from a known one is never written.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ringdance.cluster.hostfile import NAME
from ringdance.errors import LaunchError
from ringdance.launch.remote.shell import RemoteShell
from ringdance.launch.system.machine import in_home


@dataclass
class Keys:
    """The known and the offered keys of a host.

    Attributes:
        host: as given.
        name: the host in ssh's file of known hosts.
        file: that file.
        new: keys to write, by their type; none if one differs from a known one.
        states: what each key is, by its type: "is known", "is new: FINGERPRINT" or "HAS CHANGED".
        problem: why nothing is to be written, or "".
    """

    host: str
    name: str = ""
    file: str = ""
    new: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def scan(hosts: Sequence[str], shell: RemoteShell, timeout: float) -> list[Keys]:
    """Get the keys of all hosts at once.

    Raises:
        LaunchError: a host's name is invalid.
    """
    for host in hosts:
        if not NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not the name of a host: letters, digits, dots and dashes")

    def one(host: str) -> Keys:
        keys = Keys(host)
        try:
            _scan(keys, shell, timeout)
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            keys.problem = str(error)
        return keys

    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        return list(pool.map(one, hosts))


def _scan(keys: Keys, shell: RemoteShell, timeout: float) -> None:
    port_option = ["-p", str(shell.port)] if shell.port else []
    settings: dict[str, str] = {}
    for line in _output(["ssh", "-G", *shell.arguments, *port_option, "--", keys.host], 10.0).splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, value)
    address, port = settings.get("hostname", keys.host), settings.get("port", "22")
    alias = settings.get("hostkeyalias", "").replace("none", "")
    keys.name = alias or (address if port == "22" else f"[{address}]:{port}")
    keys.file = in_home(settings.get("userknownhostsfile", "~/.ssh/known_hosts").split()[0])
    command = ["ssh-keyscan", "-T", str(max(1, int(timeout))), "-p", port, "--", address]
    offered = dict(_keys(_output(command, timeout + 10.0)))
    if not offered:
        keys.problem = f"no ssh answers at {address}, port {port}"
        return
    known: dict[str, set[str]] = {}
    if os.path.exists(keys.file):
        for kind, key in _keys(_output(["ssh-keygen", "-F", keys.name, "-f", keys.file], 10.0)):
            known.setdefault(kind, set()).add(key)
    for kind, key in sorted(offered.items()):
        if key in known.get(kind, ()):
            keys.states[kind] = "is known"
        elif kind in known:
            keys.states[kind] = "HAS CHANGED"
            keys.problem = (
                f"its key differs from the one in {keys.file}. If that is right: ssh-keygen -R '{keys.name}'"
            )
        else:
            keys.states[kind] = f"is new: {fingerprint(key)}"
            keys.new[kind] = key
    if keys.problem:
        keys.new.clear()


def _output(command: Sequence[str], timeout: float) -> str:
    null = subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=null, stdout=subprocess.PIPE, stderr=null, check=False, timeout=timeout
    )
    return done.stdout.decode(errors="replace")


def _keys(text: str) -> list[tuple[str, str]]:
    """Parse the lines of a file of known hosts, or of ssh-keyscan: type and key of each."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith(("#", "@")) or len(words) < 3:
            continue
        base64.b64decode(words[2], validate=True)
        found.append((words[1], words[2]))
    return found


def fingerprint(key: str) -> str:
    """Return a key's fingerprint as ssh shows it: ``SHA256:...``."""
    digest = hashlib.sha256(base64.b64decode(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def write(found: Sequence[Keys]) -> int:
    """Write the new keys to the files of known hosts, which are private; return their number.

    Raises:
        LaunchError: a file cannot be written.
    """
    for keys in found:
        lines = "".join(f"{keys.name} {kind} {key}\n" for kind, key in keys.new.items())
        try:
            os.makedirs(os.path.dirname(keys.file), mode=0o700, exist_ok=True)
            descriptor = os.open(keys.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                size = os.fstat(descriptor).st_size
                open_line = size and os.pread(descriptor, 1, size - 1) != b"\n"
                file.write((("\n" if open_line else "") + lines).encode())
        except OSError as error:
            raise LaunchError(f"{keys.file}: {error.strerror}") from None
    return sum(len(keys.new) for keys in found)
