"""An agent that receives files and forwards them."""

from __future__ import annotations

import os
import selectors
import socket
import threading

import pytest

from ringdance.host.copy.receive import Receiver
from ringdance.host.messages import Frames


@pytest.mark.parametrize("ends", ["launcher", "next host"])
def test_the_wait_for_a_stopped_host_ends(ends: str) -> None:
    read, write = os.pipe()
    reports = os.pipe()
    here, there = socket.socketpair()  # nothing reads the other end, as if the host were stopped
    receiver = Receiver(Frames(read, reports[1]), selectors.DefaultSelector())
    receiver._after = here, Frames(here.fileno(), here.fileno())
    chunk = {"do": "chunk", "file": 0, "at": 0}
    thread = threading.Thread(target=receiver.take, args=(chunk, bytes(16 << 20)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    os.close(write) if ends == "launcher" else there.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert receiver._after is None
