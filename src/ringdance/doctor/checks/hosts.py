"""How other hosts answer, and whether they are alike."""

from __future__ import annotations

from ringdance.doctor.check import ERROR, WARNING, Check
from ringdance.doctor.rows import equal, limit

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
