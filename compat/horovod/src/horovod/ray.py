"""Ray: not here; importing it says what to use."""

from horovod._absent import absent

raise absent(
    __name__,
    "Ringdance does not start jobs on Ray. Start the script with horovodrun, or call "
    "horovod.run(function, num_proc=N), which returns the ranks' results.",
)
