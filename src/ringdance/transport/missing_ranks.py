"""Who has not come to ``init()`` yet: told while the others wait, which is before MPI can carry a word.

A rank that waits shows it by the name of one of its threads, which everybody on its host can
read, as they can the environment in which the launcher started it. So nothing has to be set up
or cleared away, and a rank that has ended or was never started is missed as well. Linux only;
elsewhere, and of other hosts, nobody is named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ringdance.transport.eventcount import process_state

__all__ = ["Absence", "look_around", "tell", "waiting_in_init"]

_log = logging.getLogger("ringdance")

_MARK = "ringdance init"  # 15 characters at most
_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_OWN_RANK = "RINGDANCE_RANK"  # set by our own launcher for the rank itself, not for its wrapper


@dataclass
class Absence:
    """What this host knows: ``present`` ranks wait in init(), ``late`` are elsewhere (rank -> pid)."""

    present: set[int]
    late: dict[int, int]


@dataclass
class _Process:
    pid: int
    parent: int
    environ: dict[str, str]


@contextlib.contextmanager
def waiting_in_init(timeout: float, ranks: Collection[int] = ()) -> Iterator[None]:
    """While the body runs, this rank is seen to wait; after ``timeout`` seconds it says for whom.

    Args:
        timeout: seconds; said again after twice, four times that.
        ranks: who should come; empty for all that there are.
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
        name = next((name for name in _RANK_NAMES if name in os.environ), "")
        found = look_around(name) if name else None
        # The lowest that waits on this host speaks for all.
        if found is None or not found.present or int(os.environ[name]) == min(found.present):
            _log.warning("ringdance: %s", message(found, ranks, waited))
        timeout, waited = waited, 2 * waited


def tell(ranks: Collection[int], waited: float) -> str:
    """Return what there is to say now, while this rank waits; arguments as for ``message``."""
    name = next((name for name in _RANK_NAMES if name in os.environ), "")
    return message(look_around(name) if name else None, ranks, waited)


def look_around(rank_name: str) -> Absence | None:
    """Look at the processes of this host that the same launcher started; None where that cannot be seen.

    Args:
        rank_name: the variable in which the launcher gave each its rank.
    """
    try:
        every = {int(entry): _read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    except OSError:
        return None
    known = {pid: process for pid, process in every.items() if process is not None}

    def starter(process: _Process) -> int:
        """The nearest ancestor that is no rank: the launcher's process on this host."""
        while rank_name in process.environ and process.parent in known:
            process = known[process.parent]
        return process.pid if rank_name not in process.environ else process.parent

    own = starter(known[os.getpid()])
    found = Absence(set(), {})
    for pid in sorted(known):
        process = known[pid]
        rank_text = process.environ.get(rank_name, "")
        if not rank_text.isdigit() or starter(process) != own:
            continue
        rank = int(rank_text)
        if _marked(pid):
            found.present.add(rank)
        elif rank not in found.late or _OWN_RANK in process.environ:
            found.late[rank] = pid
    found.late = {rank: pid for rank, pid in found.late.items() if rank not in found.present}
    return found


def _read(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/environ", "rb") as raw:
            lines = raw.read().decode(errors="replace").split("\0")
    except (OSError, ValueError, IndexError):
        return None
    return _Process(pid, parent, dict(line.split("=", 1) for line in lines if "=" in line))


def _marked(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/comm") as file:
                if file.read().strip() == _MARK:
                    return True
    return False


def message(found: Absence | None, ranks: Collection[int], waited: float) -> str:
    """Return what is said: who waits on this host, who is not here, and what to look for."""
    host = socket.gethostname()
    head = f"init() on host {host} has waited {waited:g} s for other ranks to call init()"
    if found is None or not found.present:
        return f"{head}. Look for a rank that ended or hangs before its call."
    size = next((os.environ[n] for n in _SIZE_NAMES if os.environ.get(n, "").isdigit()), "0")
    expected = set(ranks) or set(range(int(size))) | found.present | set(found.late)
    late = [
        f"rank {rank} (pid {pid}{', stopped' if process_state(pid) == 'stopped' else ''})"
        for rank, pid in sorted(found.late.items())
        if rank in expected
    ]
    unseen = sorted(expected - found.present - set(found.late))
    parts = []
    if late:
        parts.append(f"Not there yet: {', '.join(late)}: see what they do before init().")
    if unseen:
        which = f"rank{'s' if len(unseen) > 1 else ''} {', '.join(map(str, unseen))}"
        parts.append(f"Not on this host: {which}: ended before init(), or on another host.")
    if not parts:
        parts.append("All have called it: MPI cannot connect them (network interface, firewall?).")
    waiting = ", ".join(map(str, sorted(found.present)))
    return f"{head}. Waiting: rank{'s' if len(found.present) > 1 else ''} {waiting}. {' '.join(parts)}"
