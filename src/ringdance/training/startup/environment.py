"""Environment variables that a rank sets, and that its child processes read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ringdance.core.engine import Engine
from ringdance.core.transport.single import OutsideTransport
from ringdance.settings import Settings
from ringdance.settings.names import RANK_NAMES, RANK_VARIABLES, SIZE_NAMES, STARTED_BY
from ringdance.training.startup.engines import world_size

# Variables that distinguish a rank from other ranks and from the ranks of other jobs.
_OF_A_LAUNCH = (*RANK_NAMES, *SIZE_NAMES, "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")


def export_ranks(engine: Engine) -> None:
    """Set the variables from which scripts read their rank, as ``ringdance run`` does."""
    for name in RANK_VARIABLES:
        value = str(getattr(engine, name.lower()))
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = value
    os.environ["HOROVOD_HOSTNAME"] = engine.identity.host


def mark_children(engine: Engine, by_mpi: bool) -> None:
    """Mark the environment so that child processes know that they are not this rank.

    They inherit its variables. Processes that a launcher starts for a job of their own get other values.
    """
    if engine.size == 1 and not (by_mpi and world_size() > 1):
        os.environ.pop(STARTED_BY, None)  # set by an earlier init()
        return
    names = _OF_A_LAUNCH if by_mpi else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank = ParentRank(
        pid=os.getpid(),
        launch={name: os.environ.get(name) for name in names},
        place={name.lower(): getattr(engine, name.lower()) for name in RANK_VARIABLES},
    )
    os.environ[STARTED_BY] = json.dumps(asdict(rank))


@dataclass(frozen=True)
class ParentRank:
    """The rank that started this process, as described in the environment.

    Attributes:
        pid: The rank's process id.
        place: The rank's ``rank``, ``size``, ``local_rank`` and so on, by name.
        launch: Variables set by the rank's launch. Processes started by another launch have different values.
    """

    pid: int
    place: dict[str, int]
    launch: dict[str, str | None]

    @classmethod
    def find(cls) -> ParentRank | None:
        """Return the rank that started this process, or None if no rank did."""
        fields = json.loads(os.environ.get(STARTED_BY, "null"))
        if fields is None or fields["pid"] == os.getpid():
            return None
        same = all(os.environ.get(name) == value for name, value in fields["launch"].items())
        return cls(**fields) if same else None

    def outside_engine(self, settings: Settings) -> Engine:
        """Return an engine that is not in a job and reports the parent's rank and size."""
        transport = OutsideTransport(self.place["rank"], self.place["size"], self.pid)
        outside = Engine(transport, settings, threaded=False)
        vars(outside).update(self.place)
        outside.disown("was started by")
        return outside
