"""Objects from one rank to all, and from all."""

from ringdance.mxnet import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
