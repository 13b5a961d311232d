"""A job's directories on a host, and a port for its ranks; standard library only."""

from __future__ import annotations

import os
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Mapping

_ROOM, _FILES = 1 << 20, 100  # what sockets and MPI's own files need at least
_LONGEST = 59  # bytes of a directory's path that leave room for a socket's address in a job's directory there


def bases(environ: Mapping[str, str]) -> list[str]:
    """Return where a job's directory may be made, the best first: as `tempfile`, without the cwd."""
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    return list(dict.fromkeys([*named, "/tmp", "/var/tmp"]))


def usable(bases: Iterable[str]) -> tuple[list[str], str]:
    """Return those in which a job's directory can be made, and in words why not in the others."""
    wrong = {base: _unusable(base) for base in bases}
    text = "; ".join(f"{base}: {why}" for base, why in wrong.items() if why)
    return [base for base, why in wrong.items() if not why], text


def _unusable(base: str) -> str:
    if not os.path.isabs(base) or os.pathsep in base or base.split() != [base]:
        return f"it is relative, or has a {os.pathsep!r} or blank in it"
    if len(base.encode()) > _LONGEST:
        return f"its path is longer than {_LONGEST} bytes"
    if not os.path.isdir(base):
        return "there is no such directory"
    if not os.access(base, os.W_OK | os.X_OK):
        return "it cannot be written"
    room = os.statvfs(base)
    full = room.f_bavail * room.f_frsize < _ROOM or (room.f_files and room.f_favail < _FILES)
    return f"it has no room for {_ROOM >> 20} MiB in {_FILES} files" if full else ""


def is_own(directory: str) -> bool:
    """Return whether it is a directory of this user's, and no link."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def free_port() -> tuple[socket.socket | None, int]:
    """Return a port of this host for MASTER_PORT, and what keeps it from others; 0 if there is none.

    While the socket is bound with SO_REUSEADDR the kernel gives the port to no program that takes any; one
    that asks for it by number, with SO_REUSEADDR too as torch's TCPStore does, gets it.
    """
    try:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0))
    except OSError:
        return None, 0
    port: int = sock.getsockname()[1]
    if not sys.platform.startswith("linux"):  # elsewhere the second bind fails
        sock.close()
    return sock, port


def host_name() -> str:
    """Return this host's name for a path, in 20 characters: the ends, and beginnings, of long ones repeat."""
    name = os.uname().nodename
    return name if len(name) <= 20 else f"{name[:11]}.{zlib.crc32(name.encode()):08x}"


def host_directory(base: str, job: str) -> str:
    """Return a job's directory on this host. Hosts may share `base`, so their names are part of it.

    The path leaves room in a socket's address (108 bytes; macOS 104) if `base` is :func:`usable`.
    """
    return os.path.join(base, f"ringdance-{job[:12]}-{host_name()}")


OWN_DIRECTORY = "{directory}"
"""Placeholder for :func:`host_directory` of the host in messages to its agent."""

TIMELINE = "timeline."
"""Beginning of a file's name in the job's directory: a timeline that the launcher gets at the end."""

OUTPUT = "output"
"""Name in the job's directory of another host: what is in it goes to the launcher's ``--output-filename``."""

METRICS_DIR = "RINGDANCE_METRICS_DIR"
"""Variable with the directory of such files."""

SHARED = "{shared}"
"""Placeholder in a variable's value for :func:`host_shared` of the host where a rank runs."""


def host_shared(job: str) -> str:
    """Return a job's directory in this host's shared memory; "" if there is none."""
    return host_directory("/dev/shm", job) if os.access("/dev/shm", os.W_OK) else ""
