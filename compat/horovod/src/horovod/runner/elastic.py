"""Driver of elastic jobs: not available yet. The error on import says what is available instead."""

from horovod._absent import absent

raise absent(
    __name__,
    "jobs keep the processes and hosts that they start with. To restore training after errors, use the "
    "state, the sampler and the decorator for training loops in horovod.torch.elastic.",
)
