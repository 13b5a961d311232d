"""Determine from /proc what threads on this host are doing. Linux only; nothing is known elsewhere.

Standard library only, because ``ringdance explain`` needs it too.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import time
from typing import NamedTuple

from ringdance.host.system import linux

_COMPUTES = 0.3  # share of a core above which a thread counts as computing
_IN_CALL = ", probably in a call that holds the GIL"
_LOCKED = "waits for a lock, a queue or another thread"
_MOST_THREADS = 2
_PRIVATE = 128  # FUTEX_PRIVATE_FLAG, which means that no other process can wake the thread
_OPEN, _READ, _WRITE, _FILE_LOCK, _CHILD, _CONNECT, _ACCEPT, _POLL, _LOCK, _SLEEP, _DEVICE = range(11)
# System call numbers on x86-64, and on arm64 and riscv64. They are part of the kernel's stable ABI.
_X86 = {
    257: _OPEN, 2: _OPEN, 0: _READ, 17: _READ, 19: _READ, 45: _READ, 47: _READ, 1: _WRITE, 18: _WRITE,
    20: _WRITE, 44: _WRITE, 46: _WRITE, 74: _WRITE, 75: _WRITE, 72: _FILE_LOCK, 73: _FILE_LOCK, 61: _CHILD,
    247: _CHILD, 42: _CONNECT, 43: _ACCEPT, 288: _ACCEPT, 7: _POLL, 23: _POLL, 232: _POLL, 270: _POLL,
    271: _POLL, 281: _POLL, 202: _LOCK, 35: _SLEEP, 230: _SLEEP, 16: _DEVICE,
}  # fmt: skip
_ARM = {
    56: _OPEN, 63: _READ, 65: _READ, 67: _READ, 207: _READ, 212: _READ, 64: _WRITE, 66: _WRITE, 68: _WRITE,
    206: _WRITE, 211: _WRITE, 82: _WRITE, 83: _WRITE, 25: _FILE_LOCK, 32: _FILE_LOCK, 260: _CHILD,
    95: _CHILD, 203: _CONNECT, 202: _ACCEPT, 242: _ACCEPT, 22: _POLL, 72: _POLL, 73: _POLL, 98: _LOCK,
    101: _SLEEP, 115: _SLEEP, 29: _DEVICE,
}  # fmt: skip
_CALLS = _X86 if platform.machine() == "x86_64" else _ARM
_WITHOUT_FILE = {_SLEEP: "sleeps", _LOCK: _LOCKED, _POLL: "waits for a socket or a pipe"}
_WITH_SOCKET = {_CONNECT: "connects to", _ACCEPT: "waits for a connection to", _WRITE: "sends data to"}


class CpuSample(NamedTuple):
    """A thread's total CPU time in seconds (``used``), and when it was sampled (``time.monotonic``)."""

    time: float
    used: float


def sample_cpu(pid: int, tid: int = 0) -> CpuSample | None:
    """Read a thread's CPU time, or return None if it cannot be read.

    Args:
        pid: A process on this host.
        tid: Kernel thread id. 0 for the main thread.
    """
    words = linux.text(f"/proc/{pid}/task/{tid or pid}/schedstat").split()
    return CpuSample(time.monotonic(), int(words[0]) / 1e9) if words else None


def thread_state(pid: int, tid: int = 0) -> tuple[str, str]:
    """Return a thread's name and one-letter state code, or empty strings if the thread does not exist."""
    head, _, tail = linux.text(f"/proc/{pid}/task/{tid or pid}/stat").rpartition(")")
    return head.partition("(")[2], tail.strip()[:1]


def task_ids(pid: int) -> list[int]:
    """Return the kernel ids of a process's threads, or an empty list if they are unknown."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def wakeable(tid: int) -> tuple[int, str]:
    """Return how long a thread of this process has run or waited for a core (ns), and what it is doing.

    The latter is "sleeps" if only another thread of this process can wake it, "" if it waits for something
    else or with a timeout, and "runs" in all other cases, including when nothing is known.
    """
    used = sum(map(int, linux.text(f"/proc/self/task/{tid}/schedstat").split()[:2]))
    call = linux.text(f"/proc/self/task/{tid}/syscall").split()  # read last: if it runs later, ``used`` grows
    if not used or len(call) < 7:
        return used, "runs"
    futex = _CALLS.get(int(call[0])) == _LOCK and int(call[2], 16) & _PRIVATE and int(call[4], 16) == 0
    return used, "sleeps" if futex else ""


def activity(pid: int, tid: int = 0, before: CpuSample | None = None) -> str:
    """Return a clause such as "sleeps" or "reads /data/x", or "" if nothing is known.

    Args:
        pid: A process on this host.
        tid: Kernel thread id. 0 for the main thread.
        before: An earlier sample.
    """
    _, letter = thread_state(pid, tid)
    if letter in ("T", "t"):
        return "is stopped (SIGSTOP or a debugger)"
    if letter == "R" or _share(before, sample_cpu(pid, tid)) > _COMPUTES:
        return "computes"
    where = linux.text(f"/proc/{pid}/task/{tid or pid}/wchan").removeprefix("0")
    call = linux.text(f"/proc/{pid}/task/{tid or pid}/syscall").split()
    text = _in_call(pid, call, "pipe" in where or "partner" in where)
    if letter == "D":
        return f"{text or 'waits'} in uninterruptible I/O ({where or 'state D'})"
    # The kernel reveals system calls only of processes that this process has permission to trace.
    return text or (_LOCKED if where.startswith("futex") else "")


def describe_threads(pid: int, before: CpuSample | None) -> str:
    """Describe what keeps a process from answering: its main thread, and other running threads.

    Args:
        pid: A process on this host.
        before: An earlier sample of the main thread.

    Returns:
        A clause such as "its main thread waits for a lock, a queue or another thread", or "" if nothing is
        known.
    """
    _, letter = thread_state(pid)
    if not letter:
        return ""
    share, doing = _share(before, sample_cpu(pid)), activity(pid, 0, before)
    if doing == "computes" and before and share <= _COMPUTES:
        doing += f", but with {share:.0%} of a core: the cores of its host are busy"
    elif doing != _LOCKED and letter != "D":
        doing = f"{doing or f'sleeps in the kernel (state {letter})'}{_IN_CALL}"
    others = _running_threads(pid)
    more = f" and {len(others) - _MOST_THREADS} more" if len(others) > _MOST_THREADS else ""
    text = f"its main thread {doing}"
    return text + (f"; other running threads: {', '.join(others[:_MOST_THREADS])}{more}" if others else "")


def _share(before: CpuSample | None, now: CpuSample | None) -> float:
    """Return the share of a core that a thread used between two samples, 0 if unknown."""
    if before is None or now is None or now.time <= before.time:
        return 0.0
    return (now.used - before.used) / (now.time - before.time)


def _running_threads(pid: int) -> list[str]:
    """Describe the threads of a process that are running now, except its main thread."""
    states = {tid: thread_state(pid, tid) for tid in task_ids(pid) if tid != pid}
    return [f"'{name}' (thread id {tid})" for tid, (name, letter) in states.items() if letter == "R"]


def _in_call(pid: int, call: list[str], pipe: bool) -> str:
    if len(call) < 7:
        return ""
    kind = _CALLS.get(int(call[0]), -1)
    first, second, third = (int(word, 16) for word in call[1:4])
    if kind == _CHILD:
        child = first if call[0] in ("61", "260") else second
        return f"waits for its child process {_command(child)}".rstrip()
    if kind == _OPEN:
        at, flags = (first, second) if call[0] == "2" else (second, third)
        path = _memory_at(pid, at)
        # Opening one end of a FIFO blocks until the other end is opened.
        return _with_pipe(flags & os.O_ACCMODE == os.O_WRONLY, path) if pipe else f"opens {path or 'a file'}"
    return _WITHOUT_FILE.get(kind, "") or ("" if kind < 0 else _with_file(pid, kind, first, pipe))


def _with_file(pid: int, kind: int, descriptor: int, pipe: bool) -> str:
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    if path.startswith("socket:"):
        address = _address(pid, path[8:-1], 1 if kind == _ACCEPT else 2)
        return f"{_WITH_SOCKET.get(kind, 'waits for data from')} {address}"
    if kind == _FILE_LOCK:
        return f"waits for a lock on the file {path}{_holder(pid)}"
    if kind == _DEVICE:
        return "waits for the GPU" if "/nvidia" in path else ""
    if pipe or path.startswith("pipe:"):  # not determined with stat(), which may itself hang
        return _with_pipe(kind == _WRITE, path)
    return f"{'reads' if kind == _READ else 'writes'} {path}"


def _with_pipe(writes: bool, path: str) -> str:
    name = "a pipe" if path.startswith("pipe:") else f"the FIFO {path}"
    return f"waits until {name} is read" if writes else f"waits for data from {name}"


def _holder(pid: int) -> str:
    """Describe which process holds the file lock that a process waits for."""
    lines = [line.replace("->", " -> ").split() for line in linux.text("/proc/locks").splitlines()]
    waits = {line[0] for line in lines if line[1] == "->" and line[5] == str(pid)}
    for line in lines:
        if line[0] in waits and line[1] != "->":
            return f", held by process {_command(int(line[4]))}"
    return ", which no process of this host is known to hold"


def _command(pid: int) -> str:
    """Return a process's id, and its command if known, or "" if ``pid`` is a wildcard as for waitpid()."""
    words = linux.text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:100]
    return f"{pid} ({words})" if words else str(pid) if 0 < pid < 1 << 31 else ""


def _memory_at(pid: int, address: int) -> str:
    """Return the C string at an address in a process's memory, or "" if it cannot be read."""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return os.fsdecode(file.read(4096).partition(b"\0")[0])
    return ""


def _address(pid: int, inode: str, end: int) -> str:
    """Return the local address (``end`` 1) or the remote address (2) of a TCP socket, as "host:port"."""

    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in linux.text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode:
                address, port = fields[end].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                return f"{socket.inet_ntop(family, struct.pack(f'={len(words)}I', *words))}:{int(port, 16)}"
    return "a socket"

