"""How other hosts answer, and whether they are alike; ssh's files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Host, Hosts
from ringdance.doctor.rows import equal, limit, several

_AHEAD_S = 1.0


def _ssh_modes(host: Host) -> Iterator[Finding]:
    modes = host["machine"]["ssh"]
    keys = [path for path, mode in modes["keys"].items() if mode & 0o077]
    directories = [path for path, mode in modes["directories"].items() if mode & 0o022]
    if keys:
        yield Finding(f"others may read {several(keys)}, so ssh ignores it", f"chmod 600 {shlex.join(keys)}")
    if directories:
        yield Finding(
            f"others may write {several(directories)}, so sshd refuses keys",
            f"chmod go-w {shlex.join(directories)}",
        )


def _same_machine(hosts: Hosts) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for name, host in hosts.items():
        first = seen.setdefault(host["machine"]["identity"], name)
        if first != name:
            fix = "name it once, with all its slots"
            yield Finding(f"{name} is the same machine as {first}", fix, hosts=(first, name))


def _clocks(hosts: Hosts) -> Iterator[Finding]:
    for name, host in hosts.items():
        low, high = host["reach"].get("ahead", (0.0, 0.0))  # absent if it was not reached
        least = max(low, -high)  # 0 is between low and high if the clocks may agree
        if least > _AHEAD_S:
            way = "ahead of" if low > 0 else "behind"
            yield Finding(
                f"the clock of {name} is {least:.0f} s or more {way} this machine's",
                "sudo systemctl enable --now chrony (or systemd-timesyncd) there",
                hosts=(name,),
            )


CHECKS = (
    Check("reached", "hosts", ERROR,
          "whether ssh reaches the hosts without a prompt, and finds this interpreter with ringdance there",
          limit("reached", lambda host: host["reach"]["error"], "{reach[fix]}", problem="{reach[error]}",
                applies=lambda host: not host["reach"].get("local")), ("reach",)),
    Check("ssh-permissions", "hosts", ERROR,
          "private keys that others may read: ssh ignores them; ~, ~/.ssh and authorized_keys that others "
          "may write: sshd refuses the key", _ssh_modes, ("machine",)),
    Check("working-folder", "hosts", ERROR,
          "whether the directory in which the command will run exists on all hosts",
          limit("{machine[cwd][path]} exists",
                lambda host: not host["machine"]["cwd"]["exists"],
                "put the directory on a shared disk, or copy it to the same path there",
                problem="there is no {machine[cwd][path]}",
                applies=lambda host: host["machine"]["cwd"]["path"]), ("machine",)),
    Check("same-machine-twice", "hosts", ERROR, "two names for one machine: its cores would be used twice",
          _same_machine, ("machine",), compares=True),
    Check("clocks", "hosts", WARNING,
          "clocks of the hosts, compared with this one's: logs mislead, tokens expire, caches go wrong",
          _clocks, ("reach",), compares=True),
    Check("same-user", "hosts", WARNING, "user of the hosts: files of one are not another's",
          equal(lambda host: {"user": host["machine"]["user"]},
                "ssh as the same user everywhere (User in ~/.ssh/config)"), ("machine",), compares=True),
    Check("same-system", "hosts", ERROR, "processor architecture and C library of the hosts",
          equal(lambda host: {
                    "architecture": host["machine"]["architecture"],
                    "C library": host["machine"]["libc"] or "of no known version",
                },
                "use one image, or the same architecture and the same release of the system, on all hosts",
                {"C library": WARNING}), ("machine",), compares=True),
)  # fmt: skip
