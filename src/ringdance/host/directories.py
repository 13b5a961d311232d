"""A job's directories on a host, and a port for its ranks. Standard library only."""

from __future__ import annotations

import os
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Mapping

_ROOM, _FILES = 1 << 20, 100  # free bytes and inodes needed for sockets and MPI's own files
_LONGEST = 59  # maximum length of a directory's path in bytes, to leave room for a job's socket in it


def bases(environ: Mapping[str, str]) -> list[str]:
    """Return possible parents of a job directory, best first.

    They are the same as in ``tempfile``, but without the current directory.
    """
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    return list(dict.fromkeys([*named, "/tmp", "/var/tmp"]))


def usable(bases: Iterable[str]) -> tuple[list[str], str]:
    """Return the ``bases`` that can hold a job directory, and the reasons why the others cannot."""
    wrong = {base: _unusable(base) for base in bases}
    text = "; ".join(f"{base}: {why}" for base, why in wrong.items() if why)
    return [base for base, why in wrong.items() if not why], text


def _unusable(base: str) -> str:
    if not os.path.isabs(base) or os.pathsep in base or base.split() != [base]:
        return f"its path must be absolute and must not contain {os.pathsep!r} or a blank"
    if len(base.encode()) > _LONGEST:
        return f"its path is longer than {_LONGEST} bytes"
    if not os.path.isdir(base):
        return "it does not exist"
    if not os.access(base, os.W_OK | os.X_OK):
        return "it is not writable"
    room = os.statvfs(base)
    full = room.f_bavail * room.f_frsize < _ROOM or (room.f_files and room.f_favail < _FILES)
    return f"it does not have space for {_FILES} files with {_ROOM >> 20} MiB in total" if full else ""


def is_own(directory: str) -> bool:
    """Return True if the path is a directory that belongs to this user, and is not a link."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def free_port() -> tuple[socket.socket | None, int]:
    """Return a free port for MASTER_PORT on this host, or 0 if none is free, and the socket that reserves it.

    While the socket is bound with SO_REUSEADDR, the kernel does not assign the port to programs that bind to
    port 0. A program that binds to this port with SO_REUSEADDR, as torch's TCPStore does, succeeds.
    """
    try:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
    except OSError:
        return None, 0
    port: int = sock.getsockname()[1]
    if not sys.platform.startswith("linux"):  # on other systems the second bind would fail
        sock.close()
    return sock, port


def host_name() -> str:
    """Return this host's name for use in paths. Long names are shortened but remain distinct."""
    name = os.uname().nodename
    return name if len(name) <= 20 else f"{name[:11]}.{zlib.crc32(name.encode()):08x}"


def host_directory(base: str, job: str) -> str:
    """Return a job's directory on this host. Hosts may share ``base``, so their names are part of the path.

    If ``base`` is ``usable()``, the path fits in a socket's address (108 bytes; 104 on macOS).
    """
    return os.path.join(base, f"ringdance-{job[:12]}-{host_name()}")


OWN_DIRECTORY = "{directory}"
"""Placeholder for the host's ``host_directory()`` in messages to its agent."""

TIMELINE = "timeline."
"""Prefix of the timeline file's name in the job's directory. The launcher receives the file at the end."""

OUTPUT = "output"
"""Subdirectory of the job directory on other hosts. Its contents go to the launcher's output directory."""

METRICS_DIR = "RINGDANCE_METRICS_DIR"
"""Environment variable with the directory of the metrics files."""

SHARED = "{shared}"
"""Placeholder in a variable's value for ``host_shared()`` on the rank's host."""


def host_shared(job: str) -> str:
    """Return a job's directory in this host's shared memory, or an empty string if the host has none."""
    return host_directory("/dev/shm", job) if os.access("/dev/shm", os.W_OK) else ""
