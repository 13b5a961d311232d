"""Report which ranks have not called ``init()``, before MPI can carry messages.

A rank that waits in ``init()`` names one of its threads ``_MARK``. All processes on its host can read that
name, and also the environment in which the launcher started the rank. Nothing has to be set up or cleaned
up, and ranks that have exited or were never started are also detected. Linux only. On other systems, and for
ranks on other hosts, the report names no ranks.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ringdance.core.transport.eventcount import process_state
from ringdance.host.system import linux
from ringdance.settings.names import RANK_NAMES, SIZE_NAMES

_log = logging.getLogger("ringdance")

_MARK = "ringdance init"  # a thread name, for which Linux allows at most 15 characters
_OWN_RANK = "RINGDANCE_RANK"  # set by our launcher for the rank itself, but not for a wrapper process


@dataclass
class _Ranks:
    """Ranks on this host: ``present`` are waiting in init(), ``late`` (rank -> pid) are not yet."""

    present: set[int] = field(default_factory=set)
    late: dict[int, int] = field(default_factory=dict)


@contextlib.contextmanager
def waiting_in_init(timeout: float, ranks: Collection[int] = ()) -> Iterator[None]:
    """Mark this rank as waiting, and warn after ``timeout`` seconds which ranks are missing.

    Args:
        timeout: Seconds until the first warning. The warning is repeated after twice as long, four times as
            long, and so on.
        ranks: Expected ranks. Empty for all.
    """
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done, timeout, ranks), name=_MARK, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _watch(done: threading.Event, timeout: float, ranks: Collection[int]) -> None:
    with contextlib.suppress(OSError):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(_MARK)
    waited = timeout
    while not done.wait(timeout):
        name, local = _scan()
        # Only the lowest waiting rank on the host reports.
        if not local.present or int(os.environ[name]) == min(local.present):
            _log.warning("ringdance: %s", _report(local, ranks, waited))
        timeout, waited = waited, 2 * waited


def missing_rank_report(ranks: Collection[int], waited: float) -> str:
    """Report which ranks on this host are waiting, and which are missing.

    Args:
        ranks: Expected ranks. Empty for all.
        waited: Seconds for which this rank has waited.
    """
    return _report(_scan()[1], ranks, waited)


def _scan() -> tuple[str, _Ranks]:
    """Return the name of the launcher's rank variable, and the ranks that it started on this host."""
    import psutil  # imported late, because the import takes 30 ms

    name = next((name for name in RANK_NAMES if name in os.environ), "")
    local = _Ranks()
    if not name or not os.path.isdir("/proc"):
        return name, local
    processes = {
        process.pid: (process.info["ppid"], process.info["environ"])
        for process in psutil.process_iter(["ppid", "environ"])
        if process.info["environ"] is not None
    }

    def launcher(pid: int) -> int:
        """Return the nearest ancestor that is not a rank: the launcher's process on this host."""
        while pid in processes and name in processes[pid][1]:
            pid = processes[pid][0]
        return pid

    own = launcher(os.getpid())
    for pid, (_, environ) in sorted(processes.items()):
        if not environ.get(name, "").isdigit() or launcher(pid) != own:
            continue
        rank = int(environ[name])
        if _is_marked(pid):
            local.present.add(rank)
        elif rank not in local.late or _OWN_RANK in environ:
            local.late[rank] = pid
    local.late = {rank: pid for rank, pid in local.late.items() if rank not in local.present}
    return name, local


def _is_marked(pid: int) -> bool:
    return any(linux.text(path) == _MARK for path in glob.iglob(f"/proc/{pid}/task/*/comm"))


def _report(found: _Ranks, ranks: Collection[int], waited: float) -> str:
    head = f"init() on host {socket.gethostname()} has waited {waited:g} s for other ranks to call init()"
    if not found.present:
        return f"{head}. Look for a rank that exited or hangs before it calls init()."
    size = next((os.environ[n] for n in SIZE_NAMES if os.environ.get(n, "").isdigit()), "0")
    expected = set(ranks) or set(range(int(size))) | found.present | set(found.late)
    late = [
        f"rank {rank} (pid {pid}{', stopped' if process_state(pid) == 'stopped' else ''})"
        for rank, pid in sorted(found.late.items())
        if rank in expected
    ]
    absent = expected - found.present - set(found.late)
    parts = []
    if late:
        parts.append(f"Still missing: {', '.join(late)}. Check what is running there before init().")
    if absent:
        where = "either exited before init() (check the output), or is running on another host"
        parts.append(f"Not on this host: {_listed(absent)}. Each of them {where}.")
    if not parts:
        parts.append("All ranks have called init(), but MPI cannot connect them. Check network and firewall.")
    return f"{head}. Waiting: {_listed(found.present)}. {' '.join(parts)}"


def _listed(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
