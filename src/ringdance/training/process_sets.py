"""Process sets: subsets of the ranks that run collectives independently, added and removed at any time."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.errors import ArgumentError
from ringdance.training import session

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """A subset of the ranks.

    Args:
        ranks_or_comm: Global ranks in any order, or an mpi4py communicator whose members form the set.

    Attributes:
        process_set_id: Id of the set, or ``None`` if it is not registered.
        ranks: Sorted global ranks, or ``None`` if they are not known yet.
        mpi_comm: Communicator from which the set was created, or ``None``.

    Raises:
        ArgumentError: A rank is negative, repeated, or not an integer.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Any) -> None:
        self.mpi_comm: Any = None
        self.ranks: list[int] | None = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ArgumentError(
                f"ProcessSet takes integer ranks or an mpi4py communicator, got {ranks_or_comm!r}."
            ) from None
        if len(set(self.ranks)) != len(self.ranks) or (self.ranks and self.ranks[0] < 0):
            raise ArgumentError(f"ProcessSet({self.ranks}): ranks must be unique and non-negative.")

    def size(self) -> int | None:
        """Return the number of members, or ``None`` if the set is not registered."""
        return None if self.process_set_id is None else len(session.engine().members(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process's rank in the set, or ``None`` if the set is not registered.

        Raises:
            ArgumentError: This process is not a member.
        """
        if self.process_set_id is None:
            return None
        engine = session.engine()
        return members_of(engine, self.process_set_id).index(engine.rank)

    def included(self) -> bool | None:
        """Return whether this process is a member, or ``None`` if the ranks are not known yet."""
        rank = session.engine().rank
        return None if self.ranks is None else rank in self.ranks

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        return self  # Not copied, because it refers to a set in the job, like a communicator.

    def __getstate__(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "mpi_comm": None}  # The id is valid only in this job.

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks, with id 0. Shared by all bindings, because scripts compare it with ``is``."""

    process_set_id = 0

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return list(range(session.engine().size)) if session.is_initialized() else None

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()


def set_id(process_set: ProcessSet) -> int:
    """Return the id of a registered set.

    Raises:
        ArgumentError: The set is not registered (it may have been removed), or is not a ProcessSet.
    """
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise ArgumentError(f"process_set must be a ProcessSet, got {process_set!r}.") from None
    if number is None:
        raise ArgumentError(
            f"{process_set} is not registered. Pass it to init(process_sets=[...]) or to add_process_set()."
        )
    return number


def members_of(engine: Engine, number: int) -> tuple[int, ...]:
    """Return the ranks of a set. Raises ArgumentError if this process is not a member."""
    members = engine.members(number)
    if engine.rank not in members:
        raise ArgumentError(
            f"Rank {engine.rank} ({engine.hosts[engine.rank]}) is not a member of process set {number} with "
            f"the ranks {list(members)}. Only members may use it. Check process_set.included() first."
        )
    return members


def bound_id(process_set: ProcessSet) -> int:
    """Store and return the id of the registered set with the same ranks. Raises the errors of ``set_id``."""
    if isinstance(process_set, ProcessSet):
        with contextlib.suppress(KeyError):
            bind([process_set])
    return set_id(process_set)


def takes_part(process_set: ProcessSet) -> bool:
    """Return True if this rank exchanges data with other ranks of the set."""
    engine = session.engine()
    members = engine.members(set_id(process_set))
    return len(members) > 1 and engine.rank in members


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set. Blocks until all ranks in the job, members or not, call this with the same set.

    Raises:
        ArgumentError: A rank is out of range or repeated, or a set with these ranks already exists. If only
            some ranks pass such a set, the others get a MismatchError.
        NotImplementedError: The set was created from a communicator. Pass such sets to ``init``.
        MismatchError: The ranks passed different sets. Raised on all ranks.
    """
    if hasattr(process_set, "Get_group") or getattr(process_set, "mpi_comm", None) is not None:
        raise NotImplementedError(
            "add_process_set() does not accept sets made from a communicator. Pass the set to init()."
        )
    engine = session.engine()
    # The engine validates the ranks, and makes the other ranks' calls fail if this call is wrong.
    number = engine.add_process_set(
        (process_set.ranks or ()) if isinstance(process_set, ProcessSet) else process_set
    )
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(engine.members(number))
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Blocks until all ranks in the job call this. Pending operations on the set fail.

    Returns:
        ``False`` for the global set and for sets that are not registered, otherwise ``True``.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    engine = session.engine()
    registered = number in engine.process_sets()
    if registered:
        engine.remove_process_set(number)
    process_set.process_set_id = None
    return registered


def ranks_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Return the global ranks of a set. For a set made from a communicator, also determine and store them."""
    if process_set.mpi_comm is not None:
        process_set.ranks = list(session.engine().transport.ranks_of(process_set.mpi_comm))
    return tuple(process_set.ranks or ())


def bind(process_sets: list[ProcessSet]) -> None:
    """Give each set the id of the registered set with the same ranks. Does not communicate.

    Groups of torch.distributed are not considered, because only their members know them.

    Raises:
        KeyError: No set with these ranks is registered.
    """
    registered = session.engine().process_sets()
    known = {members: number for number, members in registered.items() if number < FIRST_GROUP}
    for process_set in process_sets:
        ranks = ranks_of(process_set)
        process_set.process_set_id = known.get(ranks)
        if process_set.process_set_id is None:  # Not registered, or registered in a job that ended.
            raise KeyError(f"No process set has the ranks {list(ranks)}. Add it with add_process_set().")
