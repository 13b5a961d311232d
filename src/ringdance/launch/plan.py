"""What the launcher will do, as data: pure, so that it can be printed, compared and tested."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ringdance.errors import LaunchError
from ringdance.launch.hosts import LOCAL_NAMES, Host, HostList, place
from ringdance.launch.mpi import Mpi
from ringdance.launch.wire import bare_command

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
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_SOCKET, _GUARDIAN = "SOCKET", "GUARDIAN"


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


def build_plan(
    command: Sequence[str],
    *,
    ranks: int,
    mpi: Mpi,
    cores: int,
    environ: Mapping[str, str],
    hosts: HostList | None = None,
    exports: Mapping[str, str] | None = None,
    local: Collection[str] = LOCAL_NAMES,
    root: bool = False,
    binding: Sequence[str] | None = None,
    mpi_args: Sequence[str] = (),
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
        local: which names in `hosts` are this machine.
        root: whether the user is root.
        binding: options of mpiexec in place of ours that bind ranks to no cores.
        mpi_args: more options of mpiexec; they win over ours.

    Raises:
        LaunchError: too few slots, or a host that is not this machine.
    """
    if ranks < 1:
        raise LaunchError(f"-np {ranks}: the number of ranks must be 1 or more")
    placed = place(ranks, _one_machine(hosts or [("localhost", ranks)], local))
    exports = dict(exports or {})
    threads = None
    variables: dict[str, str] = {"PYTHONUNBUFFERED": "1"}
    path = exports.get("PYTHONPATH", environ.get("PYTHONPATH"))
    exports["PYTHONPATH"] = os.pathsep.join([_SITE, *([path] if path else [])])
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in exports:
        threads = max(1, cores // max(len(host.ranks) for host in placed))
        variables["OMP_NUM_THREADS"] = str(threads)
    options, extra = _mpiexec(mpi.family, root, binding, mpi_args)
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
        mpiexec=(mpi.mpiexec, *options, "-n", str(ranks)),
    )


def _one_machine(hosts: HostList, local: Collection[str]) -> HostList:
    """The same hosts as one: this machine, by the first name given for it, with all their slots."""
    for name, _ in hosts:
        if name not in local:
            raise LaunchError(
                f"host {name!r} is not this machine; this version starts ranks on one machine. "
                "Over several machines start the script with mpiexec or srun: it runs unchanged."
            )
    return [(hosts[0][0], sum(slots for _, slots in hosts))]


def _mpiexec(
    family: str, root: bool, binding: Sequence[str] | None, more: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Options of mpiexec, and variables that go with them."""
    options: dict[str, list[str]] = {}
    variables: dict[str, str] = {}
    if family == "openmpi":
        options = {"--bind-to": ["none"], "--map-by": ["slot"]}
        # Always: mpiexec counts physical cores (affinity masks and hyperthreads differ), and what
        # oversubscription changes in the ranks is only to yield when idle, which is wanted anyway.
        fixed = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        # The UCX window component prints an error when a shared window is made without its hardware.
        variables = {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native"}
        # On one machine only shared memory is needed; looking for network hardware takes MPI_Init a second.
        # (Named by what is left out: Open MPI 4 calls the component for shared memory vader, later ones sm.)
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^tcp,openib,ofi,uct,usnic,ugni,portals4"}
        if root:
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif family == "mpich":
        options, fixed = {"-bind-to": ["none"]}, ["-launcher", "fork"]
    else:
        fixed = ["-bootstrap", "fork"]
        variables = {} if binding else {"I_MPI_PIN": "0"}
    own = [_spelt(word, family) for word in (*(binding or ()), *more)]
    ours = [] if binding is not None else [[name, *rest] for name, rest in options.items() if name not in own]
    # A parameter that the user gives as an option would else be given twice.
    for given in [f"OMPI_MCA_{own[at + 1]}" for at, word in enumerate(own[:-1]) if word == "--mca"]:
        variables.pop(given, None)
    return [*(word for words in ours for word in words), *fixed, *own], variables


_LONG = re.compile(
    r"-(allow-run-as-root|bind-to|bind-to-[a-z]+|cpu-set|display-[a-z]+|host|hostfile|machinefile|map-by|mca"
    r"|merge-stderr-to-stdout|nooversubscribe|output-filename|oversubscribe|path|pmixmca|prefix|prtemca|rank-by"
    r"|report-bindings|stdin|tag-output|timestamp-output|wdir|with-ft)"
)


def _spelt(word: str, family: str) -> str:
    """An option as Open MPI 5 wants it: older ones also took long options with one dash."""
    return f"-{word}" if family == "openmpi" and _LONG.fullmatch(word) else word


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
        for component in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma"):
            found[f"OMPI_MCA_{component}_backing_directory"] = shared
    return found
