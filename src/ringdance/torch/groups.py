"""Join the job that a torch.distributed process group needs, and number the groups.

torch makes a group on its members alone. They meet by torch's store, agree on a number that none of them
uses, and make a process set of the engine.
"""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.errors import ArgumentError
from ringdance.settings.names import LAUNCH_PREFIX
from ringdance.training import basics, session
from ringdance.training.startup.engines import launched_size

_prefixed: Any = vars(dist)["PrefixStore"]
_attempt = ""  # name of this process's part of the store
_Base: Any = dist.ProcessGroup


class Group(_Base):  # type: ignore[misc]
    """What a process group has of the job: its process set in the engine.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        set_id: Number of the process set.
    """

    def __init__(self, options: Any, set_id: int) -> None:
        super().__init__(options.group_rank, options.group_size)
        engine = session.engine()
        self._engine, self._number, self._known = weakref.ref(engine), set_id, engine.sets.find(set_id)
        self._destroyed = False

    @property
    def _set_id(self) -> int:
        """Number of the process set. Raises ArgumentError if it does not exist anymore."""
        engine, rank = session.engine(), self.rank()
        if self._destroyed:
            why = "was destroyed"
        elif self._engine() is engine and engine.sets.registered.get(self._number) is not self._known:
            why = "was freed after a call in it had timed out"  # its number may be another group's now
        elif self._engine() is engine or (not self._number and engine.size == self.size()):
            return self._number
        else:
            why = "belongs to the job as it was before shutdown() and init()"
        raise ArgumentError(
            f"This process group of {self.size()} ranks {why} (rank {rank} in it, {engine.identity}): make "
            "the group again by new_group() or init_process_group(), and what uses it, such as "
            "DistributedDataParallel."
        )

    def shutdown(self) -> None:
        """Free what a group of some ranks has; the job ends with the process, or by hvd.shutdown()."""
        engine = self._engine()
        if self._number and not self._destroyed and engine is not None and not engine.closed:
            engine.leave_group(self._number)
        self._destroyed = bool(self._number)

    abort = shutdown


def process_set(options: Any) -> int:
    """Return the number of a new group's process set; torch calls this on its members.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        ArgumentError: torch.distributed and the job number the ranks differently.
    """
    ranks, rank, size = tuple(options.global_ranks_in_group), options.group_rank, options.group_size
    if list(ranks) != sorted(ranks):
        raise ArgumentError(
            f'The backend "ringdance" needs ranks in ascending order, got {list(ranks)}: leave out '
            "sort_ranks=False of new_group()."
        )
    if not session.is_initialized():
        if ranks and size < dist.get_world_size():
            raise ArgumentError(
                'The first group of the backend "ringdance" must have all ranks: call '
                'init_process_group("ringdance"), or hvd.init() on all ranks before new_group().'
            )
        if size > 1 and _started_by_torchrun():
            from ringdance.torch import gloo

            store = gloo.own_store(_prefixed("ringdance", options.store.clone()), rank, size)
            session.init(transport=(size, functools.partial(gloo.world, store, rank, size)))
        else:
            basics.init()
    engine = session.engine()
    if ranks:
        return engine.add_group(_meet(engine, options), ranks)
    if (rank, size) != (engine.rank, engine.size):
        raise ArgumentError(
            f"This process is rank {rank} of {size} for torch.distributed and rank {engine.rank} of "
            f"{engine.size} in the job: start it by one launcher, torchrun or `ringdance run`, not by one "
            "within the other; give init_process_group neither rank= nor world_size=; and leave RANK and "
            "WORLD_SIZE as the launcher sets them."
        )
    return 0


def of_this_attempt(store: Any) -> Any:
    """Return the part of a store that ranks of an earlier attempt have not used.

    torchrun's agents keep one store for all attempts of ``--max-restarts`` and for all members of
    ``--nnodes=2:4``, with what was in it, and each agent counts its own attempts only.
    """
    global _attempt
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    if not _attempt:
        _attempt = _agreed(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return _prefixed(_attempt, store)


def _agreed(store: Any, rank: int, size: int) -> str:
    """Return a name that rank 0 makes up. Nothing that is still in the store is mistaken for it."""
    own, until = uuid4().hex, time.monotonic() + store.timeout.total_seconds()
    if rank:
        store.set(f"hello/{rank}", own)
        name: str = store.get(own).decode()  # waits for the answer
        store.add(name, 1)
        return name
    while store.add(own, 0) < size - 1 and time.monotonic() < until:
        for other in range(1, size):
            if store.check([f"hello/{other}"]):
                store.set(store.get(f"hello/{other}").decode(), own)
        time.sleep(0.01)
    return own  # without all of them the next call says so


def _started_by_torchrun() -> bool:
    """Return whether MPI does not know the ranks."""
    own = LAUNCH_PREFIX in os.environ  # `ringdance run` sets torchrun's variables too
    return launched_size() is None or ("TORCHELASTIC_RUN_ID" in os.environ and not own)


def _meet(engine: Engine, options: Any) -> int:
    """Wait for the other members of a new group; return a number that none of them uses.

    Nothing is left in the store: torch gives the next group of the same ranks the same part of it, if they
    destroy this one and have made it by themselves.
    """
    store, root, size, rank = options.store, options.store, options.group_size, options.group_rank
    if size == 1:
        return _free(0, engine.group_numbers())
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    if rank == 0:
        store.set("first", str(root.add("ringdance/groups", 1) - 1))
    keys = ["first", *(f"used/{member}" for member in range(size))]
    store.set(f"used/{rank}", json.dumps(engine.group_numbers()))
    store.add("arrived", 1)
    try:
        _wait_for_members(engine, options)
        first, *used = map(json.loads, store.multi_get(keys))
    finally:
        if store.add("read", 1) == size:  # before any member can go on: they make the process set together
            for key in (*keys, "arrived", "read", "decided"):
                store.delete_key(key)
    return _free(first, {number for one in used for number in one})


def _wait_for_members(engine: Engine, options: Any) -> None:
    """Return once all members have arrived, or raise on all of them: the first to decide does so for all."""
    store, size, begun, pause = options.store, options.group_size, time.monotonic(), 1e-3
    ranks, said = list(options.global_ranks_in_group), False
    # A blocking call would keep others from the store.
    while (arrived := store.add("arrived", 0)) < size:
        late = time.monotonic() - begun
        gives_up = engine.closed or late > options.timeout.total_seconds()
        if gives_up and store.compare_set("decided", "", "failed") == b"failed":
            break
        if not said and late > engine.settings.stall_check_time:
            said = True
            engine.report(
                f"{engine.identity} waits in new_group({ranks}), which only {arrived} of {size} members have "
                "joined: all of them call it, in one order with others; with use_local_synchronization=True, "
                "after as many other groups as the rest."
            )
        time.sleep(pause)
        pause = min(0.02, 1.2 * pause)
    if store.compare_set("decided", "", "made") == b"failed":
        if engine.closed:
            raise engine.end.error()
        raise dist.DistStoreError(
            f"new_group({ranks}): not all {size} members called it within {options.timeout} (timeout= of the "
            "rank that called it first). Call it on all members at about the same time, or give more time."
        )


def _free(first: int, used: Any) -> int:
    """Return the first number that is not used, from ``first`` on and round."""
    for number in range(first, first + FIRST_GROUP):
        if number % FIRST_GROUP not in used:
            return number % FIRST_GROUP
    raise ArgumentError(
        f"The members of this group are in {FIRST_GROUP} process groups, and no more can be numbered: "
        "destroy those that are not needed."
    )
