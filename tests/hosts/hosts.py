"""Hosts made of namespaces, each with its own network, name, processes, mounts, /dev/shm and sshd.

A bridge connects them, in its own namespace, so that this machine's network is not touched. Files are
shared as over NFS, except /dev/shm, /run, /root/.ssh and /etc/hosts. Needs root, `ip` and `sshd`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

_NET = "10.83.7"
_SSHD = "/usr/sbin/sshd"
_INSIDE = """
hostname "$1"; mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run; mkdir -p /run/sshd; mkdir -m 1777 /run/tmp
mount --bind "$2/ssh" /root/.ssh; mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/$1.boot_id" /proc/sys/kernel/random/boot_id
exec /usr/sbin/sshd -D -e -f "$2/sshd_config"
"""
_SSHD_CONFIG = """
Port 22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/ssh/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
PidFile none
SetEnv TMPDIR=/run/tmp
"""


def why_not() -> str:
    """Return why such hosts cannot exist here ("" if they can)."""
    if os.name != "posix" or not hasattr(os, "getuid") or os.getuid() != 0:
        return "needs root"
    needed = ("ip", "tc", "unshare", "nsenter", "ssh-keygen", _SSHD)
    missing = [name for name in needed if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (Debian: openssh-server iproute2)"
    if subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        return "may not make namespaces"
    return ""


_made: list[Hosts] = []


def remove_all(number: int, frame: object) -> NoReturn:
    """Exit on a signal without tearing down fixtures, which would wait for what runs on the hosts."""
    for hosts in tuple(_made):
        hosts.down()
    os._exit(128 + number)


class Hosts:
    """`count` hosts h1, h2, ... `rate` limits the links in Mbit/s (0: no limit).

    Args:
        directory: Directory for keys and settings. Its path must be short.
        count: Number of hosts.
        rate: Rate of each link, in both directions.
        domain: Domain of all names except a host's own name, as for pods: "job.ns.svc".
        ipv6: If True, hosts have only IPv6 addresses.
    """

    def __init__(
        self, directory: Path, count: int, rate: int = 0, domain: str = "", ipv6: bool = False
    ) -> None:
        self.directory, self.rate = directory, rate
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self._tag = "rd" + uuid.uuid4().hex[:5]
        self._switch = f"{self._tag}sw"
        self._outer: dict[str, subprocess.Popen[bytes]] = {}
        _made.append(self)
        self._init: dict[str, int] = {}
        suffix = f".{domain}" if domain else ""
        self._net, self._bits = ("fd83:7::", 64) if ipv6 else (f"{_NET}.", 24)
        self.address = {name: f"{self._net}{number}" for number, name in enumerate(self.names, 1)}
        self._prepare("".join(f"{self.address[name]} {name}{suffix}\n" for name in self.names))
        try:
            self._up()
        except BaseException:
            self.down()
            raise

    def _prepare(self, names: str) -> None:
        (self.directory / "ssh").mkdir(parents=True, mode=0o700)
        for path in ("ssh/id_ed25519", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / path))
        shutil.copy(self.directory / "ssh/id_ed25519.pub", self.directory / "ssh/authorized_keys")
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        (self.directory / "sshd_config").write_text(_SSHD_CONFIG.format(directory=self.directory))
        Path("/run/sshd").mkdir(exist_ok=True)
        Path("/root/.ssh").mkdir(exist_ok=True, mode=0o700)

    def _up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for name in self.names:
            self._add(name)
        for name in self.names:
            answers = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]
            answers += ["-o", "UserKnownHostsFile=/dev/null", self.address[name], "true"]
            if wait_until(lambda line=answers: self.run(self.names[0], *line).returncode == 0, 20.0) is None:
                raise RuntimeError(f"{name} does not come up")

    def _add(self, name: str) -> None:
        space = self._tag + name
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        # A fixed address, because the other hosts remember it when the host comes back.
        number = self.address[name].removeprefix(self._net)
        pair = f"eth0 address 02:00:00:00:07:{number:0>2} type veth peer name"
        _run("ip", "-n", space, "link", "add", *pair.split(), name, "netns", self._switch)
        for where, device in ((space, "eth0"), (self._switch, name)) if self.rate else ():
            limit = f"tbf rate {self.rate}mbit burst 512kb latency 50ms".split()
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit)
        _run("ip", "-n", self._switch, "link", "set", name, "master", "br0", "up")
        own = f"{self.address[name]}/{self._bits}"
        _run("ip", "-n", space, "addr", "add", own, "dev", "eth0", *(["nodad"] if self._bits > 32 else []))
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        (self.directory / f"{name}.boot_id").write_text(f"{uuid.uuid4()}\n")
        line = [
            "nsenter",
            f"--net=/run/netns/{space}",
            "unshare",
            "--uts",
            "--ipc",
            "--mount",
            "--pid",
            "--fork",
        ]
        line += ["--kill-child", "--mount-proc", "/bin/sh", "-c", _INSIDE, "host", name, str(self.directory)]
        log = open(self.directory / f"{name}.log", "wb")  # noqa: SIM115
        self._outer[name] = process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if wait_until(lambda: bool(children.read_text().split()), 10.0) is None:
            raise RuntimeError(f"{name} has no first process")
        self._init[name] = int(children.read_text().split()[0])

    def line(self, name: str, *command: str) -> list[str]:
        """Return the command line that runs `command` on a host as if from a login there."""
        enter = ["nsenter", "-t", str(self._init[name]), "-a", f"--wd={os.getcwd()}"]
        return [*enter, "env", "TMPDIR=/run/tmp", *command]

    def run(
        self, name: str, *command: str, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on a host to its end."""
        return subprocess.run(
            self.line(name, *command),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            env={**os.environ, **(env or {})},
        )

    def start(self, name: str, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start `command` on a host, with its output in a file."""
        with open(log, "wb") as file:
            return subprocess.Popen(
                self.line(name, *command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def end(self, outer: subprocess.Popen[bytes]) -> None:
        """Interrupt what ``start`` has started, nsenter's child, like Ctrl-C."""
        subprocess.run(["pkill", "-INT", "-P", str(outer.pid)], check=False)
        outer.wait(30.0)

    def unplug(self, name: str) -> None:
        """Take a host's link down at the switch."""
        _run("ip", "-n", self._switch, "link", "set", name, "down")

    def plug(self, name: str) -> None:
        """Bring a host's link up again."""
        _run("ip", "-n", self._switch, "link", "set", name, "up")

    def kill(self, name: str) -> None:
        """SIGKILL everything on a host. The other hosts see its connections close."""
        os.kill(self._init[name], signal.SIGKILL)

    def power_off(self, name: str) -> None:
        """Kill a host silently: the other hosts do not see its connections close."""
        self.unplug(name)
        self.kill(name)

    def revive(self, name: str) -> None:
        """Start a host again after it was killed."""
        self._outer.pop(name).wait(10.0)
        subprocess.run(["ip", "netns", "del", self._tag + name], check=False)
        wait_until(lambda: name not in _run("ip", "-n", self._switch, "-br", "link"), 5.0)
        self._add(name)

    def alive(self, name: str) -> bool:
        """Return True if a host is running."""
        return self._outer[name].poll() is None

    def processes(self, name: str) -> dict[int, str]:
        """Return pids (as this machine sees them) and command lines of a host's processes, except sshd."""
        if not self.alive(name):
            return {}
        space = os.stat(f"/proc/{self._init[name]}/ns/pid").st_ino
        lines = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.stat(entry / "ns/pid").st_ino != space:
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if line and "sshd" not in line.split(" -c ")[0]:
                lines[int(entry.name)] = line
        return lines

    def leftovers(self, name: str, job: str = "") -> list[str]:
        """Describe what jobs have left on a host. In /tmp, only directories of `job` count, if given."""
        left = [f"{name}: process {pid}: {line[-150:]}" for pid, line in self.processes(name).items()]
        root = Path(f"/proc/{self._init[name]}/root")
        for directory in ("dev/shm", "run/tmp"):
            # (PyTorch's files for the next run and a killed TensorFlow's files do not belong to a job.
            # Flight records are kept for reading.)
            kept = ("torchinductor", "ringdance-flight-", "__autograph_generated_file", "__pycache__")
            paths = [path for path in (root / directory).iterdir() if not path.name.startswith(kept)]
            left += [f"{name}: /{directory}/{path.name}" for path in paths]
        # (All hosts share /tmp. If the lock is still held, the directory belongs to another run's job, on
        # hosts with the same names: a process of this run would have been found above.)
        directories = Path("/tmp").glob(f"ringdance-{job[:12] or '*'}-{name}")
        return left + [str(path) for path in directories if not _locked(path)]

    def down(self) -> None:
        """Remove all hosts."""
        if self in _made:
            _made.remove(self)
        for process in self._outer.values():
            process.kill()
            process.wait()
        for name in [*(self._tag + name for name in self.names), self._switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _locked(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return True  # being removed right now
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Wait for the condition. Return how many seconds that took, or None if it took over `seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return None
        time.sleep(0.02)
    return time.monotonic() - began
