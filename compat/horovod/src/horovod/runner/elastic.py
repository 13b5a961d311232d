"""Driver of elastic jobs: not available yet. Importing this module tells what is available."""

from horovod._absent import absent

raise absent(
    __name__,
    "jobs keep the processes and hosts that they start with. horovod.torch.elastic has the state, the "
    "sampler and the decorator for training loops, which restore after errors.",
)
