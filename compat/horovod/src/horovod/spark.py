"""Spark: not available. Importing this module tells what to use instead."""

from horovod._absent import absent

raise absent(
    __name__,
    "Ringdance does not start jobs on Spark. Write the data to files from Spark, for instance as "
    "Parquet, and train with horovodrun, or call horovod.run(function, num_proc=N), which returns the "
    "ranks' results.",
)
