"""The backend "ringdance" of torch.distributed: ``dist.init_process_group("ringdance")``.

Collectives on CPU tensors go through the engine, so DistributedDataParallel, FSDP and libraries built on them
exchange through shared memory and MPI. Collectives on GPU tensors go through NCCL. torch finds the backend
through ``ringdance.training.torch_entry_point``.

As with torch's own backends, the calls on a group are matched by order, results are written to the output
tensors, and ``wait()`` raises the error of a failed ``Work``.
"""

from __future__ import annotations

from typing import Any

from ringdance.torch.backend.groups import of_this_attempt, process_set
from ringdance.torch.backend.process_group import ProcessGroup


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Create a process group. torch calls this on the group's members. See ``groups.process_set``."""
    options.store = of_this_attempt(options.store)
    return ProcessGroup(options, process_set(options))
