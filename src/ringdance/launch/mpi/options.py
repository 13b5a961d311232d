"""Options of each MPI library's mpiexec, and the variables that go with them: pure."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ringdance.launch.hosts import Host, Networks
from ringdance.launch.mpi import Mpi

DOOR = "DOOR"
"""Stands for the program that mpiexec calls in place of ssh, whose path is known only once the job exists."""

MACHINES = f"{DOOR}.machines"
"""Stands for a file beside it, as :func:`machine_file` writes it."""

_OTHER_SCHEDULERS = "^slurm,lsf,pbs,tm,gridengine"


@dataclass(frozen=True)
class Given:
    """What the options are made from.

    Attributes:
        mpi: the library.
        hosts: where the ranks go.
        root: whether the user is root.
        binding: options in place of ours that bind ranks to no cores, or None.
        more: more options; they win over ours.
        networks: over which the hosts meet.
        infiniband: whether any host has such devices.
        cramped: whether any host lacks room for Open MPI's shared memory.
    """

    mpi: Mpi
    hosts: Sequence[Host]
    root: bool = False
    binding: Sequence[str] | None = None
    more: Sequence[str] = ()
    networks: Networks = field(default_factory=Networks)
    infiniband: bool = False
    cramped: bool = False

    @property
    def include(self) -> str:
        """The networks to use: by interface where that is called the same on all hosts, or as they are.

        Open MPI reads no IPv6 networks, and must find these itself.
        """
        names = {host.interfaces for host in self.hosts}
        if len(names) == 1 and all(names):
            return ",".join(names.pop())
        return "" if self.networks.ipv6 else ",".join(self.networks.include)

    @property
    def wide(self) -> bool:
        """Whether there are ranks on other hosts."""
        return not all(host.local for host in self.hosts)


def label(host: Host, number: int) -> str:
    """What a host is called towards mpiexec, which needs no address for it; an IPv6 address has colons."""
    return f"host{number}" if ":" in host.name else host.name


def machines(hosts: Sequence[Host], between: str) -> str:
    """The hosts as mpiexec calls them, each with its number of ranks: ``h1:2,h2:2``."""
    return between.join(f"{label(host, n)}:{len(host.ranks)}" for n, host in enumerate(hosts))


def machine_file(hosts: Sequence[Host], family: str) -> str:
    """What stands in it: a line for each host, for Intel MPI; for Open MPI 4 one for each rank."""
    if family == "intel":
        return machines(hosts, "\n") + "\n"
    return "".join(f"{label(host, n)}\n" * len(host.ranks) for n, host in enumerate(hosts))


def options_of(given: Given) -> tuple[list[str], dict[str, str]]:
    """Options of mpiexec but the number of ranks, and variables for it and the ranks."""
    family = given.mpi.family
    replaceable, fixed, variables = (_openmpi if family == "openmpi" else _hydra)(given)
    own = [_spelt(word, family) for word in (*(given.binding or ()), *given.more)]
    ours = (
        []
        if given.binding is not None
        else [[name, *rest] for name, rest in replaceable.items() if name not in own]
    )
    # A parameter that the user gives as an option would else be given twice.
    for name in [f"OMPI_MCA_{own[at + 1]}" for at, word in enumerate(own[:-1]) if word == "--mca"]:
        variables.pop(name, None)
        if name == "OMPI_MCA_btl_tcp_if_exclude":  # Open MPI takes one of the two only
            variables.pop("OMPI_MCA_btl_tcp_if_include", None)
    return [*(word for words in ours for word in words), *fixed, *own], variables


_Options = tuple[dict[str, list[str]], list[str], dict[str, str]]


def _openmpi(given: Given) -> _Options:
    # --oversubscribe always: mpiexec counts physical cores (affinity masks and hyperthreads differ), and
    # what it changes in the ranks is only to yield when idle, which is wanted anyway.
    fixed = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # The UCX window component prints an error when a shared window is made without its hardware.
    variables = {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_psec": "native"}
    # On one machine only shared memory is needed; looking for network hardware takes MPI_Init a second.
    # (Named by what is left out: Open MPI 4 calls the component for shared memory vader, later ones sm.)
    if given.cramped and not given.wide:
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    elif not given.wide:
        variables |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^tcp,openib,ofi,uct,usnic,ugni,portals4"}
    else:
        fixed += _openmpi_launch(given)
        # One TCP connection does not send and receive at once.
        variables["OMPI_MCA_btl_tcp_links"] = "4"
        left_out = ["sm", "vader"] if given.cramped else []
        if not given.infiniband:
            variables["OMPI_MCA_pml"] = "ob1"
            left_out += ["openib", "ofi", "uct", "usnic", "ugni", "portals4"]
            if given.mpi.major >= 5:
                # A connection that a dead rank has closed is an error of the call, not the end of the
                # process: the engine raises RankLostError. (With ob1 only: it would replace UCX.)
                variables["OMPI_MCA_mpi_ft_enable"] = "1"
        if left_out:
            variables["OMPI_MCA_btl"] = "^" + ",".join(left_out)
        if given.include:
            variables["OMPI_MCA_btl_tcp_if_include"] = given.include
        elif given.networks.exclude:
            variables["OMPI_MCA_btl_tcp_if_exclude"] = ",".join(["127.0.0.0/8", *given.networks.exclude])
    if given.root:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    way = "seq" if given.wide and given.mpi.major == 4 else "slot"  # see _openmpi_launch
    return {"--bind-to": ["none"], "--map-by": [way]}, fixed, variables


def _openmpi_launch(given: Given) -> list[str]:
    """How the daemons come to the other hosts: by our agents, and whatever a scheduler would have said."""
    if given.mpi.major == 4:
        option, remote, prefix, oob = "--mca", "rsh", "orte", "oob_tcp"
    else:
        option, remote, prefix, oob = "--prtemca", "ssh", "prte", "prte"
    words = ["--host", machines(given.hosts, ",")]
    if given.mpi.major == 4:
        # It would begin with its own host, wherever that stands; so each rank has a line in a file. What
        # places ranks by lines opens the default file too, which is not everywhere.
        words = ["--hostfile", MACHINES, option, "orte_default_hostfile", MACHINES]
    for name, value in (
        ("plm", remote),
        (f"plm_{remote}_agent", f"/bin/sh {DOOR}"),
        (f"plm_{remote}_no_tree_spawn", "1"),
        (f"plm_{remote}_num_concurrent", str(max(128, len(given.hosts)))),
        ("ras", _OTHER_SCHEDULERS),
        (f"{prefix}_keep_fqdn_hostnames", "1"),
    ):
        words += [option, name, value]
    if given.include:
        words += [option, f"{oob}_if_include", given.include]
    return words


def _hydra(given: Given) -> _Options:
    """MPICH and Intel MPI."""
    intel = given.mpi.family == "intel"
    variables = {"I_MPI_PIN": "0"} if intel and not given.binding else {}
    binding = {} if intel else {"-bind-to": ["none"]}
    way = "-bootstrap" if intel else "-launcher"
    if not given.wide:
        # Ranks listen at once, for others that never come.
        return binding, [way, "fork"], variables | {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    # Intel MPI takes no number of ranks in -hosts.
    where = ["-machinefile", MACHINES] if intel else ["-hosts", machines(given.hosts, ",")]
    # By a shell, for /tmp may be mounted noexec; the script's path is in session_environment. ("ssh" would
    # get an -x first.)
    door = ["ssh", f"{way}-exec", DOOR] if intel else ["rsh", f"{way}-exec", "/bin/sh"]
    # Ranks have the environment of their host's daemon. Hydra would send its own as it is, and in clear.
    fixed = [way, *door, "-genvnone", *where]
    if intel and given.networks.ipv6:
        fixed.append("-v6")
    names = {interface for host in given.hosts for interface in host.interfaces}
    if len(names) == 1:  # hydra takes one name, which has to be the same on all hosts
        (name,) = names
        fixed += ["-iface", name]
        variables["FI_TCP_IFACE"] = name
    if not given.infiniband:
        variables["FI_PROVIDER"] = "tcp"
    return binding, fixed, variables


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
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": os.path.join(folder, "ssh")} if family == "mpich" else {}
    found = {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_orte_tmpdir_base": folder}
    if shared:
        for component in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma"):
            found[f"OMPI_MCA_{component}_backing_directory"] = shared
    return found
