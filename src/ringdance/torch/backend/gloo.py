"""Transport for ranks that torchrun started without MPI: gloo between hosts, shared memory within each host.

The ranks find each other and exchange metadata through torch's store. A window's memory is a memfd, which the
ranks on a host open through /proc, so no file is left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import mmap
import os
import socket
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from ringdance.core.transport.base import Array, Hierarchy, Identity, Pending, Transfer, Transport
from ringdance.core.transport.eventcount import NEEDS_FENCE, process_state
from ringdance.core.transport.window import Window, window_size
from ringdance.core.transport.world import check_common
from ringdance.errors import RankLostError
from ringdance.torch.device.communicators import NO_TIMEOUT, connect, dist, filled, host_and, serve

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT, "and": dist.ReduceOp.BAND,
}  # fmt: skip
_jobs = itertools.count()
_LAST = timedelta(seconds=5)
_NO_TAG = 1 << 30  # A tag that no message uses. See ``_TAGS`` in process_group.py.


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares memory with an array. The array may be read-only if it is only sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


class _Started:
    """A running gloo collective and the arrays that it uses. ``finish`` is called once, on completion."""

    def __init__(self, work: Any, *keep: Any, finish: Any = None) -> None:
        self._work, self._keep, self._finish = work, keep, finish

    def test(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # Raises an exception if the call failed.
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class _Transfer:
    """A message between two ranks. gloo reports its completion only to a thread that waits for it."""

    def __init__(self, group: Any, rank: int | None, work: Any, buffer: Array, received: bool) -> None:
        self._group, self._rank = group, rank
        self._work, self._buffer, self._received, self.source = work, buffer, received, -1
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, name="ringdance transfer", daemon=True)
        self._thread.start()
        _transfers.add(self)

    def _wait(self) -> None:
        try:
            self._work.wait()
            if self._received:
                self.source = self._work._source_rank()
        except BaseException as error:
            self._error = error

    def give_up(self) -> None:
        """Stop the waiting thread with a call that times out, which makes gloo close the connection."""
        if self._rank is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], self._rank, _NO_TAG).wait(timedelta(milliseconds=1))
            self._thread.join(1.0)

    def test(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


_transfers: weakref.WeakSet[_Transfer] = weakref.WeakSet()


@atexit.register  # Registered before the job starts, so it runs after the job has ended.
def _give_up() -> None:
    """Stop threads waiting in gloo, because one that wakes up while Python exits would abort the process."""
    for transfer in list(_transfers):
        transfer.give_up()


def world(
    store: Any, rank: int, size: int, window_bytes: int, vector_bytes: int, common: dict[str, Any]
) -> GlooTransport:
    """Return the transport of all ranks.

    Args:
        store: Store from torch.distributed, used only for this transport.
        rank: Rank of this process.
        size: Number of ranks.
        window_bytes: Size in bytes of each rank's buffers in its host's window, or 0 for no window.
        vector_bytes: Size in bytes of the longest agreement vector.
        common: Values that must be equal on all ranks, by name.

    Raises:
        SettingError: A value in ``common`` differs between ranks. Raised on all ranks.
    """
    store = dist.PrefixStore(f"job {next(_jobs)}", store)  # The job number is the same on all ranks.
    # Processes with the same identifier from host_and("pid") can share memory and see each other's PIDs.
    own = [socket.gethostname(), os.getpid(), host_and("pid"), common]
    everyone = _gather(store, "who", rank, size, own)
    check_common([(host, theirs) for host, _, _, theirs in everyone])
    identities = [Identity(number, host, pid) for number, (host, pid, _, _) in enumerate(everyone)]
    hosts = [host for _, _, host, _ in everyone]
    return GlooTransport(store, rank, identities, hosts, window_bytes, vector_bytes)


_own: dict[tuple[int, int], Any] = {}  # Stores returned by own_store, keyed by rank and size.


def own_store(store: Any, rank: int, size: int) -> Any:
    """Return a store that lives as long as rank 0's process.

    A store that torchrun's agent serves is returned as it is. Other torch.distributed stores end with their
    process group, so rank 0 serves a new store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store
    if (rank, size) not in _own:
        networks = _gather(store, "networks", rank, size, host_and("net"))
        if rank == 0:
            _own[rank, size], served = serve(size, networks)
            store.set("served", json.dumps(served))
        else:
            _own[rank, size] = connect(json.loads(store.get("served")), size)
    return _own[rank, size]


def _gather(store: Any, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Exchange values through a store, and return them in rank order. Values must be JSON-serializable."""
    keys = [f"{key}/{number}" for number in range(size)]
    try:
        store.set(f"{key}/{rank}", json.dumps(value))
        store.wait(keys)
        return [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as error:
        raise RankLostError(
            f"Rank {rank} of {size} on host {socket.gethostname()} did not find the other ranks in torch's "
            f"store. Check that all ranks and torchrun's agent are running. torch reported: {error}"
        ) from error


class GlooTransport(Transport):
    """A communicator between some or all ranks.

    Args:
        store: Store that only the members use.
        rank: This process's rank among the members.
        identities: Identities of the members.
        hosts: Identifier of each member's host. It is the same for members that can share memory.
        window_bytes, vector_bytes: See ``world``.
        parent: The communicator from which this one was split.
    """

    def __init__(
        self, store: Any, rank: int, identities: Sequence[Identity], hosts: Sequence[str], window_bytes: int,
        vector_bytes: int, parent: GlooTransport | None = None,
    ) -> None:
        self.rank, self.size, self.identities = rank, len(identities), tuple(identities)
        self.host_group = tuple(number for number, host in enumerate(hosts) if host == hosts[rank])
        self._store, self._hosts, self._vector_bytes = store, tuple(hosts), vector_bytes
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, self.size, NO_TIMEOUT)
        self._parts, self._subsets = itertools.count(), Counter[str]()
        self._noted = 0
        self._cross: GlooTransport | None = None
        self._parent = parent
        self._window_bytes = 0 if NEEDS_FENCE else window_bytes
        if self._window_bytes and len(self.host_group) > 1:
            self._make_window(window_bytes, parent)

    def _make_window(self, window_bytes: int, parent: GlooTransport | None) -> None:
        count, index = len(self.host_group), self.host_group.index(self.rank)
        size = window_size(count, self._vector_bytes, window_bytes)
        key, lowest = f"window/{self.host_group[0]}", self.identities[self.host_group[0]]
        if index == 0:
            file = os.memfd_create("ringdance window")
            os.truncate(file, size)
            self._store.set(key, str(file))
        else:
            file = os.open(f"/proc/{lowest.pid}/fd/{int(self._store.get(key))}", os.O_RDWR)
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        shared = self.shared_events(parent)
        self.window = Window(memory, index, count, self._vector_bytes, window_bytes, lambda: None, shared)
        self.window.touch()
        self.event_count = self.window.event_count
        _gather(self._store, f"{key}/ready", index, count, True)
        os.close(file)

    def allreduce(self, buffer: Array, operation: str, receive: Array | None = None) -> Pending:
        if receive is not None:
            receive[...] = buffer
        target = buffer if receive is None else receive
        options = filled(dist.AllreduceOptions(), reduceOp=_OPERATIONS[operation])
        return _Started(self._group.allreduce([torch.from_numpy(target)], options), target)

    def broadcast(self, buffer: Array, root: int) -> Pending:
        options = filled(dist.BroadcastOptions(), rootRank=root)
        return _Started(self._group.broadcast([_tensor(buffer)], options), buffer)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int]) -> Pending:
        longest = max(counts)
        equal = min(counts) == longest
        own = send if equal else np.zeros(longest, np.uint8)
        if not equal:
            own[: send.size] = send
        parts = receive[: longest * self.size] if equal else np.empty(longest * self.size, np.uint8)
        rows = list(torch.from_numpy(parts).view(self.size, longest))

        def unpack() -> None:
            start = 0
            for row, count in zip(parts.reshape(self.size, longest), counts, strict=True):
                receive[start : start + count] = row[:count]
                start += count

        work = self._group.allgather([rows], [_tensor(own)])
        return _Started(work, own, parts, receive, finish=None if equal else unpack)

    def alltoall(
        self, send: Array, send_counts: Sequence[int], receive: Array, receive_counts: Sequence[int]
    ) -> Pending:
        source, target = send[: sum(send_counts)], receive[: sum(receive_counts)]
        work = self._group.alltoall_base(
            torch.from_numpy(target), _tensor(source), list(receive_counts), list(send_counts)
        )
        return _Started(work, source, target)

    def split(self, members: Sequence[int], window_bytes: int) -> Transport | None:
        name = f"split {next(self._parts)}"  # All ranks have made the same number of splits.
        return self._part(name, members, window_bytes) if self.rank in members else None

    def subset(self, members: Sequence[int], window_bytes: int) -> Transport:
        key = str(sorted(members))
        self._subsets[key] += 1  # All members have made the same number of calls with these members.
        return self._part(f"subset {key} {self._subsets[key]}", members, window_bytes)

    def _part(self, name: str, members: Sequence[int], window_bytes: int) -> GlooTransport:
        chosen = sorted(members)
        who, hosts = zip(*[(self.identities[i], self._hosts[i]) for i in chosen], strict=True)
        store, rank = dist.PrefixStore(name, self._store), chosen.index(self.rank)
        return GlooTransport(store, rank, who, hosts, window_bytes, self._vector_bytes, self)

    def hierarchy(self) -> Hierarchy | None:
        hosts = list(dict.fromkeys(self._hosts))
        members = [[i for i, name in enumerate(self._hosts) if name == host] for host in hosts]
        sizes = tuple(map(len, members))
        if len(hosts) == 1 or max(sizes) == 1 or not self._window_bytes:
            return None
        index = self.host_group.index(self.rank)
        if index < min(sizes):
            self._cross = self._part(f"cross {index}", [group[index] for group in members], 0)
        return Hierarchy(sizes, self._window_bytes, self._cross)

    def send(self, buffer: Array, rank: int, tag: int) -> Transfer:
        work = self._group.send([_tensor(buffer)], rank, tag)
        return _Transfer(self._group, rank, work, buffer, False)

    def receive(self, buffer: Array, rank: int | None, tag: int) -> Transfer:
        tensors = [torch.from_numpy(buffer)]
        group = self._group
        work = group.recv_anysource(tensors, tag) if rank is None else group.recv(tensors, rank, tag)
        return _Transfer(group, rank, work, buffer, True)

    def post(self, rank: int, message: bytes) -> None:
        with self._store_is_there():
            number = self._store.add(f"notes/{rank}", 1)
            self._store.set(f"note/{rank}/{number}", f"{self.rank} ".encode() + message)

    def messages(self) -> list[tuple[int, bytes]]:
        notes = []
        with self._store_is_there():
            there = self._store.add(f"notes/{self.rank}", 0)
            while self._noted < there:
                self._noted += 1
                key = f"note/{self.rank}/{self._noted}"
                sender, _, message = self._store.get(key).partition(b" ")
                self._store.delete_key(key)
                notes.append((int(sender), message))
        return notes

    @contextlib.contextmanager
    def _store_is_there(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            who = self.identities[0]
            text = f"The store for messages between ranks is unreachable. Check if {who} has exited. {error}"
            raise RankLostError(text) from error

    def state(self, rank: int) -> str:
        return process_state(self.identities[rank].pid) if rank in self.host_group else "unknown"

    def close(self, agreed: bool) -> None:
        if agreed:
            if self._cross is not None:
                self._cross.close(True)
            self.window = self.event_count = None  # The memory is freed with the last view of it.
            if self._parent is None:
                self._leave_store()

    def _leave_store(self) -> None:
        """Announce that this rank is done with the store. Rank 0, which may serve it, waits for all ranks."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"closed/{self.rank}", "")
            if self.rank == 0:
                self._store.wait([f"closed/{rank}" for rank in range(self.size)], _LAST)
