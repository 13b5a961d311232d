"""Subsets of the ranks with an agreement of their own; they can be added and removed at any time."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

from ringdance.core.process_sets.registry import FIRST_GROUP
from ringdance.errors import ArgumentError
from ringdance.training import session

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the ranks.

    Args:
        ranks_or_comm: global ranks in any order, or an mpi4py communicator whose members are meant.

    Attributes:
        process_set_id: a small number once registered, else ``None``.
        ranks: sorted global ranks, ``None`` while unknown.
        mpi_comm: the communicator it was made from, or ``None``.

    Raises:
        ArgumentError: a rank is not an integer, negative, or given twice.
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
                f"ProcessSet needs ranks as integers, or an mpi4py communicator; got {ranks_or_comm!r}."
            ) from None
        if len(set(self.ranks)) != len(self.ranks) or (self.ranks and self.ranks[0] < 0):
            raise ArgumentError(f"ProcessSet({self.ranks}): every rank once, and none below 0.")

    def size(self) -> int | None:
        """Return the number of members; ``None`` while not registered."""
        return None if self.process_set_id is None else len(session.engine().members(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process's rank in the set; ``None`` while not registered.

        Raises:
            ArgumentError: this process is not a member.
        """
        if self.process_set_id is None:
            return None
        engine = session.engine()
        members = engine.members(self.process_set_id)
        if engine.rank not in members:
            raise ArgumentError(f"Rank {engine.rank} is not in the process set {list(members)}.")
        return members.index(engine.rank)

    def included(self) -> bool | None:
        """Return whether this process is a member; ``None`` while the ranks are unknown."""
        rank = session.engine().rank
        return None if self.ranks is None else rank in self.ranks

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        return self  # a handle of a set of the job, as a communicator is

    def __getstate__(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "mpi_comm": None}  # the number belongs to this job

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


class _GlobalProcessSet(ProcessSet):
    """All ranks: id 0. One object for all bindings; scripts test for its identity."""

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
        ArgumentError: it has not been registered, has been removed, or is none.
    """
    try:
        number = process_set.process_set_id
    except AttributeError:
        raise ArgumentError(f"process_set must be a ProcessSet, got {process_set!r}.") from None
    if number is None:
        raise ArgumentError(
            f"{process_set} is not registered: pass it to init(process_sets=[...]) or to add_process_set()."
        )
    return number


def bound_id(process_set: ProcessSet) -> int:
    """Return the id of the registered set with these ranks, which the object gets; errors as ``set_id``."""
    if isinstance(process_set, ProcessSet):
        with contextlib.suppress(KeyError):
            bind([process_set])
    return set_id(process_set)


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether this rank exchanges data with others in a set."""
    engine = session.engine()
    members = engine.members(set_id(process_set))
    return len(members) > 1 and engine.rank in members


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set. All ranks of the job call this, members or not, with the same ranks; blocks.

    Raises:
        ArgumentError: a rank is out of range or repeated, or a set of these ranks exists. Ranks that
            made the call correctly get a MismatchError.
        NotImplementedError: the set was made from a communicator (give those to ``init``).
        MismatchError: ranks named different members; raised on all.
    """
    if hasattr(process_set, "Get_group") or getattr(process_set, "mpi_comm", None) is not None:
        raise NotImplementedError("A set made from a communicator has to be given to init(process_sets=...).")
    engine = session.engine()
    # The engine checks the ranks, and makes a wrong call fail on the other ranks.
    number = engine.add_process_set(
        (process_set.ranks or ()) if isinstance(process_set, ProcessSet) else process_set
    )
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(engine.members(number))
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. All ranks of the job call this; blocks. Work pending on the set fails.

    Returns:
        ``False`` for the global set and for an object that is not registered, else ``True``.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    engine = session.engine()
    if number not in engine.process_sets():
        process_set.process_set_id = None
        return False
    engine.remove_process_set(number)
    process_set.process_set_id = None
    return True


def ranks_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Return the ranks of a set in the numbering of this job, and fill in those of a communicator."""
    if process_set.mpi_comm is not None:
        process_set.ranks = list(session.engine().transport.ranks_of(process_set.mpi_comm))
    return tuple(process_set.ranks or ())


def bind(process_sets: list[ProcessSet]) -> None:
    """Give the objects the ids of the registered sets with their ranks; local.

    A group of torch.distributed is not such a set: its members only know it.

    Raises:
        KeyError: no set with these ranks is registered.
    """
    registered = session.engine().process_sets()
    known = {members: number for number, members in registered.items() if number < FIRST_GROUP}
    for one in process_sets:
        ranks = ranks_of(one)
        one.process_set_id = known.get(ranks)
        if one.process_set_id is None:  # or of a job that has ended
            raise KeyError(f"No process set has the ranks {list(ranks)}: use add_process_set().")
