"""ssh: client, keys, agent."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ringdance.doctor.checks.sizes import several
from ringdance.doctor.registry import ERROR, NOTE, WARNING, Case, Finding, host_check


@host_check("ssh-client", "hosts", ERROR, "an ssh client, which reaches the other hosts", needs=("ssh",))
def client(case: Case) -> Finding | None:
    """ssh itself."""
    if case["ssh"]["client"]:
        return Finding(f"ssh is {case['ssh']['client']}")
    return Finding(
        "there is no ssh client",
        "apt-get install openssh-client (or dnf install openssh-clients)",
        "" if case.wanted.hosts else NOTE,
    )


@host_check(
    "ssh-key-permissions",
    "hosts",
    ERROR,
    "private keys that others may read: ssh ignores them ('UNPROTECTED PRIVATE KEY FILE')",
    needs=("ssh",),
)
def key_permissions(case: Case) -> Finding | None:
    """Modes of keys."""
    keys = case["ssh"]["keys"]
    loose = [path for path, mode in keys.items() if mode & 0o077]
    if loose:
        return Finding(
            f"others may read {several(loose)}, so ssh ignores it",
            "chmod 600 " + " ".join(map(shlex.quote, loose)),
        )
    return Finding(f"keys: {several(list(keys))}") if keys else None


@host_check(
    "ssh-folder-permissions",
    "hosts",
    ERROR,
    "~, ~/.ssh and authorized_keys that others may write: sshd then refuses the key",
    needs=("ssh",),
)
def folder_permissions(case: Case) -> Iterator[Finding]:
    """StrictModes."""
    loose = [path for path, mode in case["ssh"]["folders"].items() if mode & 0o022]
    if loose:
        yield Finding(
            f"others may write {several(loose)}, so sshd refuses keys",
            "chmod go-w " + " ".join(map(shlex.quote, loose)),
        )


@host_check(
    "ssh-agent",
    "hosts",
    WARNING,
    "SSH_AUTH_SOCK of an agent that is gone, as in an old tmux or screen",
    needs=("ssh",),
)
def agent(case: Case) -> Finding | None:
    """The agent."""
    state = case["ssh"]["agent"]
    if state == "dead":
        return Finding(
            "SSH_AUTH_SOCK leads to an agent that does not answer",
            "eval $(ssh-agent) && ssh-add, or: unset SSH_AUTH_SOCK",
            "" if case.wanted.hosts else NOTE,
        )
    return Finding("an ssh agent answers") if state == "answers" else None
