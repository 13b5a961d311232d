"""How other hosts answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ringdance.doctor.compare import odd_ones
from ringdance.doctor.registry import ERROR, WARNING, Case, Cases, Finding, host_check, hosts_check

_AHEAD_S = 1.0
_SAME = "install the same environment at the same place there: the interpreter is needed under the same path"


def _said(case: Case, kind: str) -> str | None:
    """What was said, if that was the kind of problem."""
    found = case["reach"]
    return str(found["said"]) if found["error"] == kind else None


@host_check(
    "host-name", "hosts", ERROR, "whether the hosts' names stand for addresses here", needs=("reach",)
)
def host_name(case: Case) -> Finding | None:
    """Resolution, as ssh does it."""
    said = _said(case, "name")
    if said is None:
        return None
    return Finding(
        f"the name stands for no address: {said}",
        "correct the name, or add it to /etc/hosts here (or to ~/.ssh/config)",
    )


@host_check(
    "ssh-answers",
    "hosts",
    ERROR,
    "whether ssh reaches the hosts at all: sshd, port, firewall",
    needs=("reach",),
)
def ssh_answers(case: Case) -> Finding | None:
    """A connection."""
    found = case["reach"]
    if found["error"] == "closed":
        return Finding(
            f"no sshd answers: {found['said']}",
            "start it there (sudo systemctl start ssh), or say its port: -p PORT",
        )
    if found["error"] in ("silent", "other", "client"):
        return Finding(
            f"ssh does not reach it: {found['said']}",
            "look at what ssh says: ssh -v -o BatchMode=yes HOST true",
        )
    return Finding("reached") if not found["error"] and not found["local"] else None


@host_check(
    "ssh-without-password",
    "hosts",
    ERROR,
    "whether ssh lets you in without a question (BatchMode)",
    needs=("reach",),
)
def ssh_without_password(case: Case) -> Finding | None:
    """Keys."""
    said = _said(case, "refused")
    return (
        None
        if said is None
        else Finding(f"ssh asks for a password: {said}", "ssh-copy-id HOST, or give the key: -i FILE")
    )


@host_check(
    "ssh-host-key", "hosts", ERROR, "whether the hosts' keys are those that ssh knows", needs=("reach",)
)
def ssh_host_key(case: Case) -> Finding | None:
    """Known hosts."""
    said = _said(case, "key")
    return (
        None
        if said is None
        else Finding(
            f"its key is not the known one: {said}", "if the host was installed anew: ssh-keygen -R HOST"
        )
    )


@host_check(
    "remote-python",
    "hosts",
    ERROR,
    "whether this interpreter is there, under the same path",
    needs=("reach",),
)
def remote_python(case: Case) -> Finding | None:
    """The interpreter."""
    said = _said(case, "python")
    return None if said is None else Finding(f"there is no {sys.executable}: {said}", _SAME)


@host_check(
    "remote-ringdance", "hosts", ERROR, "whether that interpreter has ringdance there", needs=("reach",)
)
def remote_ringdance(case: Case) -> Finding | None:
    """The package."""
    said = _said(case, "package")
    return (
        None
        if said is None
        else Finding(
            f"{sys.executable} has no ringdance there: {said}",
            f"ssh HOST {sys.executable} -m pip install ringdance",
        )
    )


@host_check(
    "login-silent",
    "hosts",
    WARNING,
    "text that ~/.bashrc prints without a terminal: scp, rsync and MPI's daemons stumble over it",
    needs=("reach",),
)
def login_silent(case: Case) -> Finding | None:
    """Noise."""
    found = case["reach"]
    if found["error"] or not found["noise"]:
        return None
    return Finding(
        f"its login prints {found['noise'].splitlines()[0]!r}",
        "put this at the top of ~/.bashrc there: case $- in *i*) ;; *) return ;; esac",
    )


@host_check(
    "working-folder",
    "hosts",
    ERROR,
    "whether the folder in which the command will run is on all hosts",
    needs=("machine",),
)
def working_folder(case: Case) -> Finding | None:
    """The working folder."""
    here = case["machine"]["here"]
    if not here["path"]:
        return None
    if here["exists"]:
        return Finding(f"{here['path']} is there")
    return Finding(
        f"there is no {here['path']}", "put the folder on a shared disk, or copy it to the same path there"
    )


@hosts_check(
    "same-machine-twice",
    "hosts",
    ERROR,
    "two names for one machine: its cores would be given away twice",
    needs=("machine",),
)
def same_machine_twice(cases: Cases) -> Iterator[Finding]:
    """Identities."""
    seen: dict[str, str] = {}
    for host, case in cases.items():
        first = seen.setdefault(case["machine"]["identity"], host)
        if first != host:
            yield Finding(
                f"{host} is the same machine as {first}",
                "name it once, with all its slots",
                hosts=(first, host),
            )
    if len(seen) == len(cases):
        yield Finding("each name is a machine of its own")


@hosts_check(
    "clocks",
    "hosts",
    WARNING,
    "clocks of the hosts, compared with this one's: logs mislead, tokens expire, make and caches go wrong",
    needs=("reach",),
)
def clocks(cases: Cases) -> Iterator[Finding]:
    """Clocks."""
    good = True
    for host, case in cases.items():
        if case["reach"]["error"]:
            continue
        low, high = case["reach"]["ahead"]
        least = low if low > 0 else -high if high < 0 else 0.0
        if least > _AHEAD_S:
            good = False
            way = "ahead of" if low > 0 else "behind"
            yield Finding(
                f"the clock of {host} is {least:.0f} s or more {way} this machine's",
                "sudo systemctl enable --now chrony (or systemd-timesyncd) there",
                hosts=(host,),
            )
    if good:
        yield Finding("clocks agree")


@hosts_check(
    "same-user",
    "hosts",
    WARNING,
    "user and system of the hosts: files of one are not another's",
    needs=("machine",),
)
def same_user(cases: Cases) -> Iterator[Finding]:
    """Users."""
    yield from odd_ones(
        {h: f"user {c['machine']['user']}" for h, c in cases.items()},
        "ssh as the same user everywhere (User in ~/.ssh/config)",
    )


@hosts_check(
    "same-system", "hosts", ERROR, "processor architecture and C library of the hosts", needs=("machine",)
)
def same_system(cases: Cases) -> Iterator[Finding]:
    """Architecture, libc."""
    values = {h: c["machine"]["architecture"] for h, c in cases.items()}
    yield from odd_ones(values, "use hosts of one architecture only")
    libraries = {h: c["machine"]["libc"] or "no version of libc" for h, c in cases.items()}
    for found in odd_ones(libraries, "use one image, or the same release of the system, on all hosts"):
        yield Finding(found.text, found.mend, WARNING, found.hosts)
