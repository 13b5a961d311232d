"""What to write in place of the options of torchrun, mpirun, srun and Horovod."""

from __future__ import annotations

from collections.abc import Container

_PER_HOST = "nproc-per-node npernode pernode ppn perhost ntasks-per-node slots-per-host processes-per-host"
_RANKS = "np n num-proc num-processes nprocs nproc ntasks world-size"
_ROWS = (
    ("cpus-per-task c", "--cpus-per-rank", "write --cpus-per-rank N"),
    ("cpus-per-task c", "--cpus", "write --cpus N, the cores of each pod"),
    ("mem", "--memory", "write --memory SIZE"),
    (f"{_PER_HOST} {_RANKS}", "--ranks-per-node", "write --nodes N and --ranks-per-node N"),
    ("N nnodes", "--nodes", "write --nodes N"),
    ("replicas nnodes nodes N", "--workers", "write --workers N, and --slots N, the ranks on each"),
    ("slots-per-worker", "--slots", "write --slots N"),
    (f"{_PER_HOST} {_RANKS}", "--processes-per-host", "write --processes-per-host N"),
    ("nnodes nodes N", "--instance-count", "write --instance-count N"),
    (_PER_HOST, "--ranks-per-host", "write --ranks-per-host N"),
    (_PER_HOST, "--ranks", "write --ranks N"),
    (_PER_HOST, "--slots", "write --slots N"),
    (_PER_HOST, "-np", "write -np N for all hosts together, or -H h1:4,h2:4 for four ranks on each"),
    (_RANKS, "-np", "write -np N, the number of ranks on all hosts together"),
    (_RANKS, "--ranks-per-trial", "write --ranks-per-trial N"),
    (_RANKS, "--slots", "write --slots N, the number of ranks on each host"),
    (_RANKS, "--ranks", "write --ranks N, the number of ranks on each host"),
    ("nnodes nodes N host nodelist w hostlist", "-H", "write -H h1:4,h2:4, the hosts and their slots"),
    ("hostfile machinefile machine-file default-hostfile nodefile f", "--hostfile", "write --hostfile FILE"),
    (
        "min-np max-np min-num-proc max-num-proc host-discovery-script elastic-timeout reset-limit "
        "blacklist-cooldown-range max-restarts", "--detach",
        "leave it out: a job keeps the ranks and hosts that it starts with, -np N and -H h1:4,h2:4",
    ),
    (
        "rdzv-backend rdzv-endpoint rdzv-id rdzv-conf master-addr master-port node-rank standalone "
        "local-addr use-env start-method role gloo mpi jsrun launcher monitor-interval", "-H",
        "leave it out: started once, on one host, this starts and connects the ranks of all hosts",
    ),
    ("oversubscribe allow-run-as-root disable-cache", "-H", "leave it out: it is always so, as in -H h1:8"),
    (
        "mca gmca bind-to map-by rank-by report-bindings cpu-bind cpu-set rankfile rf mpi-args binding-args",
        "--detach", "write `ringdance mpirun` for `ringdance run`: it takes Open MPI's options, such as "
        "-bind-to core, -map-by node and -mca NAME VALUE",
    ),
    (
        "fusion-threshold-mb cycle-time-ms cache-capacity hierarchical-allreduce hierarchical-allgather "
        "torus-allreduce timeline-mark-cycles no-stall-check stall-check-warning-time-seconds "
        "stall-check-shutdown-time-seconds log-level log-hide-timestamp thread-affinity num-nccl-streams "
        "gloo-timeout-seconds mpi-threads-disable autotune-warmup-samples autotune-steps-per-sample",
        "-x", "write -x NAME=VALUE; `ringdance settings` lists the names",
    ),
    ("cpus-per-task", "-x", "write -x OMP_NUM_THREADS=N"),
    ("genv export", "-x", "write -x NAME=VALUE"),
    ("wdir wd workdir D", "--chdir", "write --chdir DIR"),
    ("output error log-dir redirects tee o", "--output-filename", "write --output-filename DIR"),
    ("timeline-filename", "--timeline", "write --timeline FILE"),
    ("network-interfaces iface", "--network-interface", "write --network-interface A,B"),
    ("tag-output label l prepend-rank", "--prefix", "leave it out: each line begins with its [rank]"),
    ("timestamp-output prefix-output-with-timestamp prefix-timestamp", "--timestamps", "write --timestamps"),
    ("display-map display-allocation do-not-launch test-only", "--dry-run", "write --dry-run"),
    ("m module", "--detach", "write python -m MODULE as the command, after all options"),
    ("check-build", "--detach", "run `ringdance doctor`"),
    ("v", "--verbose", "write --verbose"),
    ("batch-size b", "--batch", "write --batch N, of each rank"),
    ("lr learning-rate", "--rate", "write --rate R, for the whole batch"),
)  # fmt: skip
"""Names without dashes; the option that a command has if the answer fits; the answer."""


def answer(name: str, known: Container[str]) -> str:
    """Return what to write for an option of another launcher, "" if there is nothing to say.

    Args:
        name: of the option, without the dashes before it, and with "-" for "_".
        known: the options of the command.
    """
    fitting = (text for names, needed, text in _ROWS if needed in known and name in names.split())
    return next(fitting, "")
