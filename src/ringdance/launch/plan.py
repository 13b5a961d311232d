"""What the launcher will do, as data: pure, so that it can be printed, compared and tested."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringdance.errors import LaunchError
from ringdance.launch.mpi import Mpi
from ringdance.launch.wire import bare_command

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_OF_A_RANK = (
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMIX_",
    "PMI_",
    "PRTE_LAUNCHED",
    "MPI_LOCAL",
    "HYDI_",
    "HYDRA_",
)
_SOCKET, _GUARDIAN = "SOCKET", "GUARDIAN"


@dataclass(frozen=True)
class Host:
    """A machine and the ranks on it.

    Attributes:
        name: as given by the user.
        slots: places for ranks.
        ranks: global ranks, in order of local rank.
    """

    name: str
    slots: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All that is needed to start a job.

    Attributes:
        ranks: number of ranks.
        hosts: where they go; host-major, as in Horovod.
        command: the user's command, the program's path resolved.
        environment: variables that are set for the ranks beyond the launcher's own (these win).
        removed: names of variables of the launcher's that the ranks do not get.
        threads: computing threads for each rank, or None if the user's own OMP_NUM_THREADS holds.
        mpi: library and mpiexec.
        mpiexec: options of mpiexec, its path first, up to the command.
    """

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    removed: tuple[str, ...]
    threads: int | None
    mpi: Mpi
    mpiexec: tuple[str, ...]

    def argv(self, socket: str = _SOCKET, guardian: str = _GUARDIAN) -> list[str]:
        """The whole command line; `socket` and `guardian` are known only once the job exists."""
        return [*self.mpiexec, *bare_command("rank", socket, guardian), *self.command]

    def environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """Environment for mpiexec and the ranks, from the launcher's `own`."""
        kept = {name: value for name, value in own.items() if name not in self.removed}
        return {**kept, **dict(self.environment)}

    def describe(self) -> str:
        """For people: what would be started."""
        lines = [f"ranks:       {self.ranks}"]
        lines += [
            f"host:        {host.name}: ranks {_span(host.ranks)} ({host.slots} slots)" for host in self.hosts
        ]
        threads = "your OMP_NUM_THREADS" if self.threads is None else str(self.threads)
        lines += [f"threads:     {threads} for each rank"]
        lines += [f"MPI:         {self.mpi.family} ({self.mpi.source})"]
        lines += [f"command:     {shlex.join(self.command)}"]
        lines += [f"environment: {name}={value}" for name, value in self.environment]
        lines += [f"without:     {name}" for name in self.removed]
        lines += [f"mpiexec:     {shlex.join(self.argv())}"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same for programs."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """``"h1:2,h2:4"`` as names and slots, in the order given.

    Raises:
        LaunchError: an entry has no slot count or a bad one.
    """
    hosts = []
    for entry in text.split(","):
        name, colon, count = entry.strip().rpartition(":")
        if not colon or not name or not count.isdigit() or int(count) < 1 or name.startswith("-"):
            raise LaunchError(f"-H {text}: {entry.strip()!r} is not HOST:SLOTS, for example localhost:4")
        hosts.append((name, int(count)))
    return hosts


def build_plan(
    command: Sequence[str],
    *,
    ranks: int,
    mpi: Mpi,
    cores: int,
    environ: Mapping[str, str],
    hosts: Sequence[tuple[str, int]] | None = None,
    exports: Mapping[str, str] | None = None,
    hostname: str = "localhost",
    root: bool = False,
) -> Plan:
    """Decide everything about a job; looks at nothing but its arguments.

    Args:
        command: program and its arguments, the program's path resolved.
        ranks: how many.
        mpi: what to launch with.
        cores: cores that this process may use.
        environ: the launcher's environment.
        hosts: names and slots, None for this machine with `ranks` slots.
        exports: variables to set for the ranks.
        hostname: this machine's name, accepted in `hosts`.
        root: whether the user is root.

    Raises:
        LaunchError: too few slots, or a host that is not this machine.
    """
    if ranks < 1:
        raise LaunchError(f"-np {ranks}: the number of ranks must be 1 or more")
    placed = _place(ranks, hosts or [("localhost", ranks)], hostname)
    exports = dict(exports or {})
    threads = None
    variables: dict[str, str] = {"PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in exports:
        threads = max(1, cores // max(len(host.ranks) for host in placed))
        variables["OMP_NUM_THREADS"] = str(threads)
    options, extra = _MPIEXEC[mpi.family](ranks, root)
    variables |= {name: value for name, value in extra.items() if name not in environ}
    return Plan(
        ranks=ranks,
        hosts=placed,
        command=tuple(command),
        environment=tuple({**variables, **exports}.items()),
        # Started inside another MPI job, mpiexec must not take itself for one of its ranks.
        removed=tuple(
            sorted(name for name in environ if name.startswith(_OF_A_RANK) and name not in exports)
        ),
        threads=threads,
        mpi=mpi,
        mpiexec=(mpi.mpiexec, *options),
    )


def _place(ranks: int, hosts: Sequence[tuple[str, int]], hostname: str) -> tuple[Host, ...]:
    for name, _ in hosts:
        if name not in (*LOCAL_NAMES, hostname, hostname.partition(".")[0]):
            raise LaunchError(
                f"host {name!r} is not this machine ({hostname}); this version starts ranks on one machine. "
                "Over several machines start the script with mpiexec or srun: it runs unchanged."
            )
    if len(hosts) > 1:
        raise LaunchError("-H names several hosts; this version starts ranks on one machine only")
    total = sum(slots for _, slots in hosts)
    if ranks > total:
        raise LaunchError(
            f"-np {ranks} needs {ranks} slots, but -H gives {total}; raise the count after the colon"
        )
    placed, first = [], 0
    for name, slots in hosts:
        here = min(slots, ranks - first)
        if here:
            placed.append(Host(name, slots, tuple(range(first, first + here))))
        first += here
    return tuple(placed)


def _openmpi(ranks: int, root: bool) -> tuple[list[str], dict[str, str]]:
    options = ["-n", str(ranks), "--bind-to", "none", "--map-by", "slot"]
    # Always: mpiexec counts physical cores (affinity masks and hyperthreads differ), and what
    # oversubscription changes in the ranks is only to yield when idle, which is wanted anyway.
    options += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # The UCX window component prints an error when a shared window is made without its hardware.
    extra = {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native"}
    # On one machine only shared memory is needed; looking for network hardware takes MPI_Init a second.
    extra |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
    if root:
        extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return options, extra


def _mpich(ranks: int, root: bool) -> tuple[list[str], dict[str, str]]:
    return ["-launcher", "fork", "-bind-to", "none", "-n", str(ranks)], {}


def _intel(ranks: int, root: bool) -> tuple[list[str], dict[str, str]]:
    return ["-bootstrap", "fork", "-n", str(ranks)], {"I_MPI_PIN": "0"}


_MPIEXEC = {"openmpi": _openmpi, "mpich": _mpich, "intel": _intel}


def session_environment(family: str, folder: str, shared: str) -> dict[str, str]:
    """Where the MPI library keeps its session files and its shared memory, so that both go with the job.

    Args:
        family: of the MPI library.
        folder: the job's folder.
        shared: the job's folder in shared memory, or "" if there is none.
    """
    if family != "openmpi":  # the others' files have no settable place; sweep.py finds them
        return {}
    found = {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_orte_tmpdir_base": folder}
    if shared:
        for component in ("btl_sm", "osc_sm", "osc_rdma"):
            found[f"OMPI_MCA_{component}_backing_directory"] = shared
    return found
