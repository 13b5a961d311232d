"""Describe what a thread of a process of this host does, by the system call that it is in. Linux only.

Standard library only: `ringdance explain` needs it too.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import time

__all__ = ["activity", "cpu_seconds"]

_COMPUTES = 0.3  # of a core
_OPEN, _READ, _WRITE, _FILE_LOCK, _CHILD, _SOCKET, _POLL, _LOCK, _SLEEP, _DEVICE = range(10)
# Numbers of system calls: part of the kernel's stable interface, for x86-64 and for arm64 (and riscv64).
_X86 = {
    257: _OPEN, 2: _OPEN, 0: _READ, 17: _READ, 19: _READ, 1: _WRITE, 18: _WRITE, 20: _WRITE, 74: _WRITE,
    75: _WRITE, 72: _FILE_LOCK, 73: _FILE_LOCK, 61: _CHILD, 247: _CHILD, 42: _SOCKET, 43: _SOCKET,
    45: _SOCKET, 47: _SOCKET, 288: _SOCKET, 7: _POLL, 23: _POLL, 232: _POLL, 270: _POLL, 271: _POLL,
    281: _POLL, 202: _LOCK, 35: _SLEEP, 230: _SLEEP, 16: _DEVICE,
}  # fmt: skip
_ARM = {
    56: _OPEN, 63: _READ, 65: _READ, 67: _READ, 64: _WRITE, 66: _WRITE, 68: _WRITE, 82: _WRITE, 83: _WRITE,
    25: _FILE_LOCK, 32: _FILE_LOCK, 260: _CHILD, 95: _CHILD, 203: _SOCKET, 202: _SOCKET, 242: _SOCKET,
    207: _SOCKET, 212: _SOCKET, 22: _POLL, 72: _POLL, 73: _POLL, 98: _LOCK, 101: _SLEEP, 115: _SLEEP,
    29: _DEVICE,
}  # fmt: skip
_CALLS = _X86 if platform.machine() == "x86_64" else _ARM


def cpu_seconds(pid: int, tid: int) -> float | None:
    """Return the CPU time that a thread has used; None if that is unknown."""
    words = _read(f"/proc/{pid}/task/{tid}/schedstat").split()
    return int(words[0]) / 1e9 if words else None


def activity(pid: int, tid: int, before: tuple[float, float | None] | None = None) -> str:
    """Return a clause as "sleeps" or "reads /data/x"; "" if nothing is known.

    Args:
        pid: of the process.
        tid: the kernel's number of its thread; the process's for the main thread.
        before: an earlier time (monotonic) and ``cpu_seconds`` then.
    """
    fields = _read(f"/proc/{pid}/task/{tid}/stat").rpartition(")")[2].split()
    if not fields:
        return ""
    if fields[0] in "Tt":
        return "is stopped (SIGSTOP or a debugger)"
    used, earlier = cpu_seconds(pid, tid), before[1] if before else None
    if fields[0] == "R" or (
        before and used and earlier and used - earlier > _COMPUTES * (time.monotonic() - before[0])
    ):
        return "computes"
    where = _read(f"/proc/{pid}/task/{tid}/wchan")
    pipe = "pipe" in where or "partner" in where
    text = _in_call(pid, _read(f"/proc/{pid}/task/{tid}/syscall").split(), pipe)
    if fields[0] == "D":
        text = f"{text or 'waits'} in uninterruptible I/O ({where or 'state D'})"
    return text


def _in_call(pid: int, call: list[str], pipe: bool) -> str:
    if len(call) < 7:
        return ""
    kind = _CALLS.get(int(call[0]))
    first, second = int(call[1], 16), int(call[2], 16)
    if kind == _SLEEP:
        return "sleeps"
    if kind == _LOCK:
        return "waits for a lock, a queue or another thread"
    if kind == _POLL:
        return "waits for a socket or a pipe"
    if kind == _CHILD:
        child = first if call[0] in ("61", "260") else second
        return f"waits for its child process {_command(child)}".rstrip()
    if kind == _OPEN:
        return f"opens {_path(_memory_at(pid, first if call[0] == '2' else second), pipe)}"
    if kind in (_READ, _WRITE, _FILE_LOCK, _SOCKET, _DEVICE):
        return _with_file(pid, kind, first, pipe)
    return ""


def _with_file(pid: int, kind: int, descriptor: int, pipe: bool) -> str:
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    if path.startswith("socket:"):
        return f"waits for data from {_peer(pid, path[8:-1])}"
    if kind == _FILE_LOCK:
        return f"waits for a lock on the file {path}{_holder(pid)}"
    if kind == _DEVICE:
        return "waits for the GPU" if "/nvidia" in path else ""
    return f"{'reads' if kind == _READ else 'writes'} {_path(path, pipe)}"


def _path(path: str, pipe: bool) -> str:
    if path.startswith("pipe:"):
        return "a pipe"
    return f"the FIFO {path}" if pipe else path or "a file"  # not by stat(), which may hang itself


def _holder(pid: int) -> str:
    """Describe who holds the file lock that a process waits for."""
    lines = [line.replace("->", " -> ").split() for line in _read("/proc/locks").splitlines()]
    waits = {line[0] for line in lines if line[1] == "->" and line[5] == str(pid)}
    for line in lines:
        if line[0] in waits and line[1] != "->":
            return f", held by process {_command(int(line[4]))}"
    return ", which no process of this host is known to hold"


def _command(pid: int) -> str:
    """Return a process's number, and its command if it is known; "" for no number, as for any child."""
    words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:100]
    return f"{pid} ({words})" if words else str(pid) if 0 < pid < 1 << 31 else ""


def _memory_at(pid: int, address: int) -> str:
    """Return the text at an address of a process."""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return os.fsdecode(file.read(4096).partition(b"\0")[0])
    return ""


def _peer(pid: int, inode: str) -> str:
    """Return the address at the other end of a TCP connection."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in _read(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode:
                address, port = fields[2].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                return f"{socket.inet_ntop(family, struct.pack(f'={len(words)}I', *words))}:{int(port, 16)}"
    return "a socket"


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip("\0\n ")
    except OSError:
        return ""
