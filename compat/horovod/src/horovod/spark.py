"""Spark: not available. The error on import says what to use instead."""

from horovod._absent import absent

raise absent(
    __name__,
    "Ringdance does not start jobs on Spark. Write the data to files from Spark, for example as "
    "Parquet, and train with horovodrun, or call horovod.run(function, num_proc=N), which returns the "
    "ranks' results.",
)
