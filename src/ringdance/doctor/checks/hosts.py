"""How other hosts answer, and whether they are alike."""

from __future__ import annotations

from collections.abc import Iterator

from ringdance.doctor.check import ERROR, WARNING, Check, Finding, Hosts
from ringdance.doctor.rows import equal, limit

_AHEAD_S = 1.0


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
          "whether ssh reaches the hosts without a prompt, and finds this Python and ringdance there, on a "
          "machine of its own",
          limit("reached", lambda host: host["reach"]["error"], "{reach[fix]}", problem="{reach[error]}",
                applies=lambda host: not host["reach"].get("local")), ("reach",)),
    Check("working-folder", "hosts", ERROR,
          "whether the directory in which the command will run exists on all hosts",
          limit("{machine[cwd][path]} exists",
                lambda host: not host["machine"]["cwd"]["exists"],
                "put the directory on a shared disk, or copy it to the same path there",
                problem="there is no {machine[cwd][path]}",
                applies=lambda host: host["machine"]["cwd"]["path"]), ("machine",)),
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
