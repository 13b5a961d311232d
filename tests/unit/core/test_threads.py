"""What reports say about a late rank's threads, based on their system calls and libraries."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any, cast

import pytest

from ringdance.core.callers import Callers
from ringdance.core.process_sets.pending import PendingRequests
from ringdance.core.process_sets.registry import ProcessSets
from ringdance.core.reports import procfs, stacks
from ringdance.core.reports.procfs import activity
from ringdance.core.reports.stacks import place_of, thread_locations

SERIALIZATION = "/x/site-packages/torch/serialization.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@contextmanager
def running(work: Callable[[], object]) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Run ``work`` in a thread. Yields a function that returns its entries once the first matches."""
    thread = threading.Thread(target=work, name="late")
    thread.start()

    def entries(pattern: str) -> list[dict[str, Any]]:
        locations: list[dict[str, Any]] = []
        until = time.monotonic() + 10
        while time.monotonic() < until:
            locations = [location for location in thread_locations() if location["name"] != "main thread"]
            if locations and re.fullmatch(pattern, locations[0]["doing"]):
                return locations
        raise AssertionError(locations)

    yield entries
    thread.join(10)
    assert not thread.is_alive()


def test_a_server_waits_for_a_connection_at_its_own_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, running(server.accept):
        address = server.getsockname()
        native = next(candidate.native_id for candidate in threading.enumerate() if candidate.name == "late")
        words = f"waits for a connection to 127.0.0.1:{address[1]}"
        until = time.monotonic() + 10
        while (doing := activity(os.getpid(), native or 0)) != words and time.monotonic() < until:
            time.sleep(0.01)
        socket.create_connection(address).close()
    assert doing == words


@pytest.mark.parametrize("opened", [False, True])
def test_a_library_that_reads_a_fifo_waits_for_its_writer(tmp_path: Path, opened: bool) -> None:
    """If ``torch.load``, for example, reads a FIFO, the report names the FIFO and not the loading."""
    path = tmp_path / "model"
    os.mkfifo(path)
    space: dict[str, Any] = {}
    exec(compile("def load(path):\n    open(path).read()", SERIALIZATION, "exec"), space)
    with running(lambda: space["load"](path)) as entries:
        if opened:
            with open(path, "wb"):
                (location,) = entries(f"waits for data from the FIFO {path}")
        else:
            (location,) = entries(f"waits for data from the FIFO {path}")
            path.open("wb").close()
    assert location["frames"][0].startswith(f"{__file__}:")


def test_a_library_that_reads_a_file_is_named() -> None:
    lock = threading.Lock()
    lock.acquire()
    space: dict[str, Any] = {}
    exec(compile("def save(lock):\n    lock.acquire()", SERIALIZATION, "exec"), space)
    with running(lambda: space["save"](lock)) as entries:
        entries("saves or loads a model")
        lock.release()


def test_a_loader_is_waited_for_by_a_thread_that_waits() -> None:
    """A thread that waits below a data loader waits for its data. One that reads or computes does not."""
    loader = ["/x/queue.py", "/x/site-packages/torch/utils/data/dataloader.py"]
    activities = ["waits for a socket or a pipe", "waits for data from 1.2.3.4:5", "reads /x", "computes", ""]
    assert [stacks.doing_in(loader, activity_text) for activity_text in activities] == [
        "waits for its data loader", *activities[1:4], "waits for its data loader"
    ]  # fmt: skip
    space: dict[str, Any] = {"lock": threading.Lock()}
    space["lock"].acquire()
    exec(compile("def __next__(item):\n    item()", loader[1], "exec"), space)
    with running(lambda: space["__next__"](lambda: space["lock"].acquire())) as entries:
        entries(procfs._LOCKED)  # in the user's code, which the loader has called
        space["lock"].release()


def test_the_caller_is_always_named() -> None:
    assert place_of(["a:1 in one"]) == "a:1 in one"
    assert place_of(["a:1 in one", "a:9 in two", "a:20 in f"]) == "a:1 in one, called from a:9 in two"
    other = ["a:1 in one", "a:9 in two"]
    assert place_of(["a:1 in one", "a:9 in two", "a:20 in f"], other).endswith("called from a:20 in f")
    assert place_of(["a:1 in one", "a:9 in two"], other) == "a:1 in one, called from a:9 in two"


def test_what_is_not_a_frame_ends_a_stack() -> None:
    frames = stacks.callers_of(sys._getframe())
    assert frames[0].f_code.co_name == "test_what_is_not_a_frame_ends_a_stack"
    assert frames[-1].f_back is None
    assert stacks.callers_of({}) == []


@pytest.mark.parametrize("what", ["waits", "status", "pending", "sets"])
def test_what_another_thread_adds_while_garbage_is_collected(what: str) -> None:
    """Reports survive changes by other threads.

    In Python 3.11, any allocation may collect garbage, which may let another thread run.
    """
    callers, pending = Callers(), PendingRequests(8)
    sets = Namespace(registered={})
    looks: dict[str, tuple[dict[Any, Any], Callable[[], object]]] = {
        "waits": (callers.waiting, lambda: callers.waits_in(1)),
        "status": (callers.waiting, callers.status),
        "pending": (cast("dict[Any, Any]", pending.named), pending.in_flight),
        "sets": (sets.registered, lambda: ProcessSets.ranks(cast("ProcessSets", sets))),
    }
    changed, look = looks[what]
    collected = 0

    def add(phase: str, _: object) -> None:
        nonlocal collected
        collected += 1
        changed[collected] = work

    work = Namespace(request=Namespace(set_id=0), done=lambda: False, ranks=(0,))
    before = gc.get_threshold()
    for threshold in range(1, 40):
        changed.clear()
        changed.update({-number: work for number in range(1, 30)})
        gc.callbacks.append(add)
        gc.set_threshold(threshold, 1, 1)
        try:
            look()
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(add)
    assert collected
