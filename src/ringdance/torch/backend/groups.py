"""Join the job that a torch.distributed process group needs, and number the groups.

torch creates a group only on its members. They meet through torch's store, agree on a number that none of
them uses yet, and create a process set in the engine.
"""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any
from uuid import uuid4

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.errors import ArgumentError
from ringdance.settings.names import LAUNCH_PREFIX
from ringdance.torch.device.communicators import dist
from ringdance.training import basics, session
from ringdance.training.startup import launched_size

_attempt = ""  # Prefix of this attempt's keys in the store.


def process_set(options: Any) -> int:
    """Return the number of a new group's process set. torch calls this on the group's members.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        ArgumentError: torch.distributed and the job number the ranks differently.
    """
    ranks, rank, size = tuple(options.global_ranks_in_group), options.group_rank, options.group_size
    if list(ranks) != sorted(ranks):
        raise ArgumentError(
            f'The backend "ringdance" needs ranks in ascending order, but got {list(ranks)}. Remove '
            "sort_ranks=False from new_group()."
        )
    if not session.is_initialized():
        if ranks and size < dist.get_world_size():
            raise ArgumentError(
                'The first group with the backend "ringdance" must include all ranks. Call '
                'init_process_group("ringdance") or hvd.init() on all ranks before new_group().'
            )
        if size > 1 and _started_by_torchrun():
            from ringdance.torch.backend import gloo

            store = gloo.own_store(dist.PrefixStore("ringdance", options.store.clone()), rank, size)
            session.init(transport=(size, functools.partial(gloo.world, store, rank, size)))
        else:
            basics.init()
    engine = session.engine()
    if ranks:
        return engine.add_group(_meet(engine, options), ranks)
    if (rank, size) != (engine.rank, engine.size):
        raise ArgumentError(
            f"This process is rank {rank} of {size} in torch.distributed, but rank {engine.rank} of "
            f"{engine.size} in the job. Start it with one launcher only, either torchrun or `ringdance run`. "
            "Do not pass rank= or world_size= to init_process_group, and do not change RANK and WORLD_SIZE."
        )
    return 0


def of_this_attempt(store: Any) -> Any:
    """Return a view of the store with a key prefix that no earlier attempt has used.

    torchrun's agents keep one store, including its old content, for all attempts (``--max-restarts``) and all
    hosts (``--nnodes=2:4``). Each agent counts only its own attempts.
    """
    global _attempt
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    if not _attempt:
        _attempt = _agreed(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return dist.PrefixStore(_attempt, store)


def _agreed(store: Any, rank: int, size: int) -> str:
    """Return a name that rank 0 generates. It is never confused with old content of the store."""
    own, until = uuid4().hex, time.monotonic() + store.timeout.total_seconds()
    if rank:
        store.set(f"hello/{rank}", own)
        name: str = store.get(own).decode()  # Waits for rank 0's answer.
        store.add(name, 1)
        return name
    while store.add(own, 0) < size - 1 and time.monotonic() < until:
        for other in range(1, size):
            if store.check([f"hello/{other}"]):
                store.set(store.get(f"hello/{other}").decode(), own)
        time.sleep(0.01)
    return own  # If some ranks are missing, the next call reports it.


def _started_by_torchrun() -> bool:
    """Return True if torchrun started the ranks, so that MPI does not know them."""
    own = LAUNCH_PREFIX in os.environ  # `ringdance run` also sets torchrun's variables.
    return launched_size() is None or ("TORCHELASTIC_RUN_ID" in os.environ and not own)


def _meet(engine: Engine, options: Any) -> int:
    """Wait for the other members of a new group. Returns a number that none of them uses yet.

    All keys are deleted from the store, because a later group may use the same keys: torch reuses the key
    prefix for the same ranks if this group was created with ``use_local_synchronization=True`` and destroyed.
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
        # The last member deletes the keys before any member continues, because creating the process set takes
        # all members.
        if store.add("read", 1) == size:
            for key in (*keys, "arrived", "read", "decided"):
                store.delete_key(key)
    return _free(first, {number for numbers in used for number in numbers})


def _wait_for_members(engine: Engine, options: Any) -> None:
    """Return after all members have arrived, or raise on all of them. The first member's decision applies."""
    store, size, begun, pause = options.store, options.group_size, time.monotonic(), 1e-3
    ranks, reported = list(options.global_ranks_in_group), False
    # Poll, because other threads could not use the store during a blocking call.
    while (arrived := store.add("arrived", 0)) < size:
        late = time.monotonic() - begun
        gives_up = engine.closed or late > options.timeout.total_seconds()
        if gives_up and store.compare_set("decided", "", "failed") == b"failed":
            break
        if not reported and late > engine.settings.stall_check_time:
            reported = True
            engine.report(
                f"{engine.identity} is waiting in new_group({ranks}), which only {arrived} of {size} members "
                "have called. All members must create their groups in the same order. With "
                "use_local_synchronization=True, all must have created the same number of groups before."
            )
        time.sleep(pause)
        pause = min(0.02, 1.2 * pause)
    if store.compare_set("decided", "", "made") == b"failed":
        if engine.closed:
            raise engine.end.error()
        raise dist.DistStoreError(
            f"new_group({ranks}): not all {size} members called it within {options.timeout} (the first "
            "caller's timeout=). Call it on all members at about the same time, or pass a longer timeout."
        )


def _free(first: int, used: Any) -> int:
    """Return the first unused number, starting at ``first`` and wrapping around."""
    for number in range(first, first + FIRST_GROUP):
        if number % FIRST_GROUP not in used:
            return number % FIRST_GROUP
    raise ArgumentError(
        f"The members of this group are already in {FIRST_GROUP} process groups, which is the maximum. "
        "Destroy groups that you no longer need."
    )
