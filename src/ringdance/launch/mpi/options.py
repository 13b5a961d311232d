"""Build mpiexec's options and variables for each MPI library, without side effects."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringdance.launch.hosts import Host, Networks, same_interfaces
from ringdance.launch.mpi.library import Mpi

RSH_SHIM = "RSH_SHIM"
"""Placeholder for the program that mpiexec runs as ssh. Its path is known only once the job exists."""

MACHINE_FILE = f"{RSH_SHIM}.machines"
"""Placeholder for the machine file (``machine_file()``), which is in the same directory as that program."""

_OTHER_SCHEDULERS = "^slurm,lsf,pbs,tm,gridengine"


@dataclass(frozen=True)
class MpiexecRequest:
    """Everything that mpiexec's options depend on.

    Attributes:
        mpi: The MPI library.
        hosts: Hosts with their ranks.
        root: True if the user is root.
        binding: The user's binding options, or None for the default of not binding ranks to cores.
        more: Further options from the user, which override the defaults.
        networks: Networks that connect the hosts.
        infiniband: True if any host has InfiniBand.
        small_shm: True if any host's /dev/shm is too small for Open MPI.
    """

    mpi: Mpi
    hosts: Sequence[Host]
    root: bool = False
    binding: Sequence[str] | None = None
    more: Sequence[str] = ()
    networks: Networks = field(default_factory=Networks)
    infiniband: bool = False
    small_shm: bool = False

    @property
    def include(self) -> str:
        """Networks to use, as interface names if these are the same on all hosts, otherwise as subnets.

        Empty for IPv6 subnets: Open MPI does not accept them and must detect the networks itself.
        """
        if names := same_interfaces(self.hosts):
            return ",".join(names)
        return "" if self.networks.ipv6 else ",".join(self.networks.include)

    @property
    def multi_host(self) -> bool:
        """True if any ranks run on other hosts."""
        return not all(host.local for host in self.hosts)


def host_label(host: Host, number: int) -> str:
    """Return the name to use for a host in mpiexec's options, which do not accept IPv6 addresses."""
    return f"host{number}" if ":" in host.name else host.name


def _host_list(hosts: Sequence[Host], separator: str) -> str:
    """Return the hosts' labels and rank counts, such as ``h1:2,h2:2``."""
    return separator.join(f"{host_label(host, n)}:{len(host.ranks)}" for n, host in enumerate(hosts))


def machine_file(hosts: Sequence[Host], family: str) -> str:
    """Return the text of the machine file: one line per host for Intel MPI, one per rank for Open MPI 4."""
    if family == "intel":
        return _host_list(hosts, "\n") + "\n"
    return "".join(f"{host_label(host, n)}\n" * len(host.ranks) for n, host in enumerate(hosts))


def mpiexec_options(request: MpiexecRequest) -> tuple[list[str], dict[str, str]]:
    """Return mpiexec's options, without the rank count, and variables for mpiexec and the ranks."""
    family = request.mpi.family
    defaults, fixed, variables = (_openmpi if family == "openmpi" else _hydra)(request)
    own = [*(request.binding or ()), *request.more]
    if family == "openmpi":  # accept long options with one dash, as older versions do
        own = [f"-{word}" if _LONG.fullmatch(word) else word for word in own]
    if request.binding is None:
        for name, *values in reversed(defaults):
            if name not in own:
                fixed[:0] = [name, *values]
    # If the user sets a parameter with an option, drop our variable, which would set it a second time.
    for name in [f"OMPI_MCA_{own[at + 1]}" for at, word in enumerate(own[:-1]) if word == "--mca"]:
        variables.pop(name, None)
        if name == "OMPI_MCA_btl_tcp_if_exclude":  # Open MPI rejects include and exclude together
            variables.pop("OMPI_MCA_btl_tcp_if_include", None)
    return [*fixed, *own], variables


_Options = tuple[list[list[str]], list[str], dict[str, str]]
"""Defaults that the user can replace, other options, and variables."""


def _openmpi(request: MpiexecRequest) -> _Options:
    # Always pass --oversubscribe, because mpiexec counts physical cores and ignores affinity masks and
    # hyperthreads. In the ranks, the option's only effect is that idle ranks yield their core, which is
    # desirable anyway.
    fixed = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # The UCX window component prints an error if a shared window is created where UCX's hardware is missing.
    variables = {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native"}
    # On one machine, shared memory is sufficient, and probing network hardware would add a second to
    # MPI_Init. Exclude the network components instead of naming the shared-memory component, which is vader
    # in Open MPI 4 and sm in later versions.
    if request.small_shm and not request.multi_host:
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    elif not request.multi_host:
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^tcp,openib,ofi,uct,usnic,ugni,portals4"}
    if not request.multi_host:  # otherwise mpiexec would start a daemon on each host in an allocation
        fixed += ["--mca" if request.mpi.major == 4 else "--prtemca", "ras", _OTHER_SCHEDULERS]
    else:
        fixed += _openmpi_launch(request)
        # Over a single TCP connection, Open MPI does not send and receive at the same time.
        variables["OMPI_MCA_btl_tcp_links"] = "4"
        excluded = ["sm", "vader"] if request.small_shm else []
        if not request.infiniband:
            variables["OMPI_MCA_pml"] = "ob1"
            excluded += ["openib", "ofi", "uct", "usnic", "ugni", "portals4"]
            if request.mpi.major >= 5:
                # When a dead rank's connection closes, let the call fail instead of ending the process. The
                # engine then raises RankLostError. Set this only with ob1, because it would disable UCX.
                variables["OMPI_MCA_mpi_ft_enable"] = "1"
        if excluded:
            variables["OMPI_MCA_btl"] = "^" + ",".join(excluded)
        if request.include:
            variables["OMPI_MCA_btl_tcp_if_include"] = request.include
        elif request.networks.exclude:
            variables["OMPI_MCA_btl_tcp_if_exclude"] = ",".join(["127.0.0.0/8", *request.networks.exclude])
    if request.root:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mapping = "seq" if request.multi_host and request.mpi.major == 4 else "slot"  # see _openmpi_launch
    return [["--bind-to", "none"], ["--map-by", mapping]], fixed, variables


def _openmpi_launch(request: MpiexecRequest) -> list[str]:
    """Return options that start the daemons through our agents, regardless of the scheduler."""
    if request.mpi.major == 4:
        option, remote, prefix, oob = "--mca", "rsh", "orte", "oob_tcp"
    else:
        option, remote, prefix, oob = "--prtemca", "ssh", "prte", "prte"
    words = ["--host", _host_list(request.hosts, ",")]
    if request.mpi.major == 4:
        # Open MPI 4 would place the first ranks on the local host, wherever it is in the list. Therefore,
        # list every rank on its own line in a file. The mapper for such files also opens the default host
        # file, which might not exist, so name our file as the default.
        words = ["--hostfile", MACHINE_FILE, option, "orte_default_hostfile", MACHINE_FILE]
    for name, value in (
        ("plm", remote),
        (f"plm_{remote}_agent", f"/bin/sh {RSH_SHIM}"),
        (f"plm_{remote}_no_tree_spawn", "1"),
        (f"plm_{remote}_num_concurrent", str(max(128, len(request.hosts)))),
        ("ras", _OTHER_SCHEDULERS),
        (f"{prefix}_keep_fqdn_hostnames", "1"),
    ):
        words += [option, name, value]
    if request.include:
        words += [option, f"{oob}_if_include", request.include]
    return words


def _hydra(request: MpiexecRequest) -> _Options:
    """Return the options for MPICH or Intel MPI."""
    intel = request.mpi.family == "intel"
    variables = {"I_MPI_PIN": "0"} if intel and not request.binding else {}
    defaults = [] if intel else [["-bind-to", "none"]]
    launcher = "-bootstrap" if intel else "-launcher"
    if not request.multi_host:
        # Use loopback only: ranks open listening sockets at startup, although no other host will connect.
        return defaults, [launcher, "fork"], variables | {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    # Ranks inherit the environment of the daemon on their host (-genvnone). Otherwise Hydra would send
    # mpiexec's environment unencrypted.
    if intel:  # Intel MPI's -hosts option does not accept rank counts
        fixed = [launcher, "ssh", f"{launcher}-exec", RSH_SHIM, "-genvnone", "-machinefile", MACHINE_FILE]
        fixed += ["-v6"] if request.networks.ipv6 else []
    else:
        # Run rsh_script() through a shell, because /tmp may be mounted noexec. session_environment() sets its
        # path. With the launcher "ssh" instead of "rsh", Hydra would put -x before the arguments.
        fixed = [launcher, "rsh", f"{launcher}-exec", "/bin/sh", "-genvnone"]
        fixed += ["-hosts", _host_list(request.hosts, ",")]
    names = {interface for host in request.hosts for interface in host.interfaces}
    if len(names) == 1:  # Hydra accepts only one interface name, for all hosts
        (name,) = names
        fixed += ["-iface", name]
        variables["FI_TCP_IFACE"] = name
    if not request.infiniband:
        variables["FI_PROVIDER"] = "tcp"
    return defaults, fixed, variables


_LONG = re.compile(
    r"-(allow-run-as-root|bind-to|bind-to-[a-z]+|cpu-set|display-[a-z]+|host|hostfile|machinefile|map-by|mca"
    r"|merge-stderr-to-stdout|nooversubscribe|output-filename|oversubscribe|path|pmixmca|prefix|prtemca"
    r"|rank-by|report-bindings|stdin|tag-output|timestamp-output|wdir|with-ft)"
)


def session_environment(family: str, directory: str, shared: str) -> dict[str, str]:
    """Return variables that move the library's session files and shared memory to the job's directories.

    Args:
        family: Family of the MPI library.
        directory: The job's directory.
        shared: The job's directory in shared memory, empty if it has none.
    """
    if family != "openmpi":  # other libraries' files cannot be moved, so cleanup.py removes them
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": os.path.join(directory, "ssh")} if family == "mpich" else {}
    variables = {"PRTE_MCA_prte_tmpdir_base": directory, "OMPI_MCA_orte_tmpdir_base": directory}
    if shared:
        for component in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma"):
            variables[f"OMPI_MCA_{component}_backing_directory"] = shared
    return variables
