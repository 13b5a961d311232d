"""The ssh client, its keys and who may read them."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import stat
from typing import Any

from ringdance.doctor.registry import Wanted


def look(wanted: Wanted) -> dict[str, Any]:
    """Path of the client; keys with their modes; modes of the folders around; whether an agent answers."""
    home = os.path.expanduser("~")
    folder = f"{home}/.ssh"
    private = [path[:-4] for path in glob.glob(f"{glob.escape(folder)}/*.pub") if os.path.isfile(path[:-4])]
    private += [path for path in glob.glob(f"{glob.escape(folder)}/id_*") if not path.endswith(".pub")]
    return {
        "client": shutil.which("ssh") or "",
        "home": home,
        "keys": {path: _mode_for_ssh(path) for path in sorted(set(private))},
        "folders": {
            path: _mode(path) for path in (home, folder, f"{folder}/authorized_keys") if os.path.exists(path)
        },
        "agent": _agent(os.environ.get("SSH_AUTH_SOCK", "")),
    }


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def _mode_for_ssh(path: str) -> int:
    """Of a key: ssh looks only at the user's own; a mounted Secret's belongs to root."""
    return _mode(path) if os.stat(path).st_uid == os.getuid() else 0o600


def _agent(path: str) -> str:
    """ "none", "answers" or "dead"."""
    if not path:
        return "none"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
        except OSError:
            return "dead"
    return "answers"
