"""Suggested replacements for options that belong to torchrun, mpirun, srun or Horovod."""

from __future__ import annotations

from collections.abc import Container

_ROWS = (
    (
        "nproc-per-node npernode pernode ppn perhost ntasks-per-node", "-np",
        "write -np N, the total number of ranks on all hosts, or -H h1:4,h2:4 for four ranks on each host",
    ),
    ("n num-processes nprocs nproc ntasks", "-np", "write -np N, the total number of ranks on all hosts"),
    ("nnodes nodes N host nodelist w hostlist", "-H", "write -H h1:4,h2:4, the hosts and their slots"),
    ("hostfile machinefile machine-file default-hostfile f", "--hostfile", "write --hostfile FILE"),
    (
        "min-np max-np min-num-proc max-num-proc host-discovery-script max-restarts", "--detach",
        "remove it: the number of ranks (-np N) and the hosts (-H h1:4,h2:4) do not change during a job",
    ),
    (
        "rdzv-backend rdzv-endpoint rdzv-id master-addr master-port node-rank standalone gloo mpi "
        "oversubscribe allow-run-as-root", "--detach",
        "remove it: this command, run on one host, starts and connects the ranks on all hosts",
    ),
    (
        "mca gmca bind-to map-by rank-by report-bindings mpi-args binding-args", "--detach",
        "use `ringdance mpirun` instead of `ringdance run`: it accepts Open MPI's options, such as "
        "-bind-to core, -map-by node and -mca NAME VALUE",
    ),
    (
        "fusion-threshold-mb cycle-time-ms cache-capacity hierarchical-allreduce log-level genv", "--detach",
        "write -x NAME=VALUE; `ringdance settings` lists the names",
    ),
    ("wdir wd", "--chdir", "write --chdir DIR"),
    ("network-interfaces iface", "--network-interface", "write --network-interface A,B"),
    ("m module", "--detach", "write python -m MODULE as the command, after all options"),
)  # fmt: skip
"""Each row: option names without dashes, an option that our command must have, and the advice."""


def answer(name: str, known: Container[str]) -> str:
    """Return a suggestion for replacing another launcher's option, or an empty string if there is none.

    Args:
        name: Name of the option without leading dashes, and with "_" replaced by "-".
        known: Options that the command accepts.
    """
    fitting = (text for names, needed, text in _ROWS if needed in known and name in names.split())
    return next(fitting, "")
