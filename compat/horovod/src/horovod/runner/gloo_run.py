"""Gloo: not used. Importing this module tells what to use instead."""

from horovod._absent import absent

raise absent(
    __name__,
    "MPI and shared memory connect the processes, with `--gloo` too. Call horovod.run(function, num_proc=N).",
)
