"""Simulated "hosts" that do not need root: what ssh would start there runs here, under another host name.

A program named ssh, first in PATH, runs the command in its own namespaces for host name, processes and
/dev/shm. Only the network is this machine's. The host dies with its ssh, like a real host with its network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SSH = """\
#!/bin/sh
while [ "$1" != "--" ]; do shift; done
case "$2" in other*) ;; *) echo "ssh: Could not resolve hostname $2" >&2; exit 255 ;; esac
echo "a greeting of the login shell"
exec {enter} /bin/sh -c '
hostname "$1"; mount -t tmpfs tmpfs /dev/shm; {before}; cd /; exec /bin/sh -c "$2"' ssh "$2" "$3"
"""
ENTER = (
    "unshare",
    "--user",
    "--map-root-user",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)


def why_not() -> str:
    """Return why such hosts cannot exist here ("" if they can)."""
    if not shutil.which("unshare"):
        return "needs unshare (util-linux)"
    tried = subprocess.run(
        [*ENTER, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=False, capture_output=True
    )
    if tried.returncode:
        return f"may not make user namespaces: {tried.stderr.decode().strip()}"
    return ""


def environment(directory: Path, before: str = ":") -> dict[str, str]:
    """Return the environment in which hosts called other1, other2, ... can be reached.

    Args:
        directory: Directory for the program named ssh.
        before: Shell command without single quotes, which each host runs first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ssh").write_text(_SSH.format(enter=" ".join(ENTER), before=before))
    (directory / "ssh").chmod(0o755)
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **allow, "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


# Run by a shell in a mount namespace: makes all places for temporary files read-only, except one.
READ_ONLY = """
for d in /tmp /var/tmp; do mount --bind $d $d && mount -o remount,bind,ro $d || exit 9; done
[ -z "$1" ] || mount -t tmpfs tmpfs "$1"
shift; exec "$@"
"""


def without_temporary_files(but: str, *words: str) -> list[str]:
    """Return a command that runs `words` where temporary files can be written only in `but` ("": nowhere)."""
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", but, *words]
