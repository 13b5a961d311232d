"""Gloo: not used. The error on import says what to use instead."""

from horovod._absent import absent

raise absent(
    __name__,
    "MPI and shared memory connect the processes, even with --gloo. Call horovod.run(function, num_proc=N).",
)
