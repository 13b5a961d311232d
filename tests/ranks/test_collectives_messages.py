"""Messages between two ranks, sent through the transport directly."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import ringdance.numpy as hvd
from ringdance.errors import ArgumentError
from ringdance.training import session

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
pytestmark = pytest.mark.ranks(2, 3)


def wait_for(messages: list[Any]) -> None:
    until = time.monotonic() + 30
    while not all([message.test() for message in messages]):
        assert time.monotonic() < until


def test_messages_of_any_rank() -> None:
    """Each message arrives whole, even if ranks send at the same time, whatever was posted before."""
    transport, each = session.engine().transport, 3
    if RANK:
        sent = [np.full(40_007, 10 * RANK + number, np.uint8) for number in range(each)]
        hvd.barrier()
        wait_for([transport.send(array, 0, 4) for array in sent])
        hvd.barrier()
        return
    count = each * (SIZE - 1)
    received = [np.zeros(40_007, np.uint8) for _ in range(count)]
    posted = [transport.receive(array, None, 4) for array in received[: count // 2]]
    hvd.barrier()
    time.sleep(0.1)  # the other senders' messages are already waiting
    posted += [transport.receive(array, None, 4) for array in received[count // 2 :]]
    wait_for(posted[::-1])
    hvd.barrier()
    assert all((array == array[0]).all() for array in received)
    result = sorted((message.source, int(array[0])) for message, array in zip(posted, received, strict=True))
    assert result == [(rank, 10 * rank + number) for rank in range(1, SIZE) for number in range(each)]


def test_a_message_that_is_too_large_for_mpi() -> None:
    transport, buffer = session.engine().transport, np.empty(1 << 31, np.uint8)
    for call in (transport.send, transport.receive):
        with pytest.raises(ArgumentError, match=r"at most 2147483647 bytes.* Send it in parts"):
            call(buffer, 0, 4)


def test_a_message_that_is_longer_than_the_buffer() -> None:
    """A long message does not write past the buffer, and later messages still arrive in receive order."""
    transport, after = session.engine().transport, 4096
    if RANK == 1:
        wait_for([transport.send(np.full(nbytes, 7, np.uint8), 0, 6) for nbytes in (9000, 16, 16)])
    elif RANK == 0:
        whole = np.zeros(8000 + after, np.uint8)
        short = transport.receive(whole[:8000], 1, 6)
        rest = [np.zeros(16, np.uint8) for _ in range(2)]
        later = [transport.receive(array, source, 6) for array, source in zip(rest, (None, 1), strict=True)]
        wait_for(later[::-1])
        with pytest.raises(RuntimeError, match="rank 1 has sent 9000 bytes, but the buffer has only 8000"):
            wait_for([short])
        assert not whole.any()
        assert [array.tolist() for array in rest] == [[7] * 16] * 2
    hvd.barrier()


def test_a_large_message_while_the_receiver_waits_for_something_else() -> None:
    transport = session.engine().transport
    if RANK == 1:
        wait_for([transport.send(np.full(1 << 20, 3, np.uint8), 0, 7)])
    posted = transport.receive(buffer := np.zeros(1 << 20, np.uint8), 1, 7) if RANK == 0 else None
    hvd.barrier()
    if posted is not None:
        wait_for([posted])
        assert buffer.min() == 3
