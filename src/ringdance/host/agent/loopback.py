"""Make mpiexec's listening sockets unreachable from the network if no other host takes part in the job.

Neither Open MPI's mpiexec nor Hydra has an option for this: both bind to all addresses.
Standard library only.

Note [Sockets of mpiexec]
The attack: mpiexec listens on all addresses, on ports that the system chooses, for daemons on other hosts.
Its protocol is not encrypted, and a daemon identifies itself only by the job's name, which is not secret.
Anyone who can send packets to this host could therefore talk to a program that starts processes as this user.
In a job on one host, no such connection is legitimate.

The defense: ``pidfd_getfd()`` duplicates mpiexec's sockets into the agent, which is its parent.
SO_BINDTODEVICE then restricts them to the device "lo", and the kernel delivers nothing to them from other
devices. The option belongs to the socket, not to the descriptor, so it applies to mpiexec too. mpiexec opens
its sockets before it starts a rank. Until then the agent repeats these steps every 10 ms (programs.py), so a
new socket can be reached from outside for at most that long.

If the kernel refuses (before Linux 5.7, or in a sandbox that forbids ``pidfd_getfd()``), ``restrict()``
raises OSError. The agent does not try again, and sends the launcher a note, which ``--verbose`` shows. The
job continues, and mpiexec stays reachable from the network until it exits (docs/explanation/exposure.md).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

_PIDFD_GETFD = 438  # the same number on all architectures


def restrict(pid: int) -> None:
    """Bind a child process's listening TCP sockets to the loopback device, except those on 127.0.0.1.

    Raises:
        OSError: The kernel (before Linux 5.7) or a sandbox forbids it. Not raised if the process has exited.
    """
    for sock in listening_sockets(pid):
        # Once the device is set, only root may change it.
        if not sock.getsockname()[0].startswith("127.") and not device_of(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def device_of(sock: socket.socket) -> str:
    """Return the network device to which a socket is bound, or an empty string if it is not bound to one."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).strip(b"\0").decode()


def listening_sockets(pid: int) -> Iterator[socket.socket]:
    """Yield the TCP sockets on which another process listens. Each is closed when the next is requested.

    Raises:
        OSError: The kernel or a sandbox forbids it, as for ``restrict()``.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                ours = _take(process, int(name))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EBADF):  # the socket was closed after it was listed
                    continue
                raise
            with socket.socket(fileno=ours) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    yield sock
    except (FileNotFoundError, ProcessLookupError):
        pass
    finally:
        os.close(process)


def _take(process: int, descriptor: int) -> int:
    """Duplicate a descriptor of another process (``process`` is its pidfd) into this process."""
    import ctypes

    ours = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0))
    if ours < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ours
