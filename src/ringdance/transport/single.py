"""The one-process case: a communicator of size 1, nothing to move."""

from __future__ import annotations

import os
import socket

from ringdance.transport.loopback import LoopbackTransport, LoopbackWorld

__all__ = ["single_transport"]


def single_transport() -> LoopbackTransport:
    """Return a transport for a job of one process."""
    world = LoopbackWorld(1, hosts=(socket.gethostname(),), window=False)
    transport = world.transport(0)
    assert transport.identities[0].pid == os.getpid()
    return transport
