"""LSF's jsrun: not used. The error on import says what to use instead."""

from horovod._absent import absent

raise absent(
    __name__, "mpiexec starts the processes. Within LSF's allocation, use `mpiexec -n N python train.py`."
)
