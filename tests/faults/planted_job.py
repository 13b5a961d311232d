"""A training loop on three ranks with a planted cause: ``planted_job.py CAUSE``, used by test_planted_causes.

After some steps, a cause calls ``begin``, which records the time. The line that must be reported for a rank
ends with ``# <cause>``.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

import ringdance.numpy as hvd

HERE = Path(os.environ.get("PLANTED", "."))
STEPS = 10  # before the cause


def line_of(cause: str) -> int:
    """Return the number of the line that ends with ``# <cause>``, or 0 if no line does."""
    lines = Path(__file__).read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.endswith(f"# {cause}")), 0)


def begin() -> None:
    (HERE / "began.part").write_text(str(time.time()))
    (HERE / "began.part").rename(HERE / "began")


def reduce(name: str) -> None:
    hvd.allreduce(np.ones(1000), name=name)


def loader_sleeping() -> None:
    def load() -> None:
        begin()
        time.sleep(600)  # loader_sleeping

    load()


def evaluated_alone() -> None:
    def evaluate_all() -> None:
        while True:
            np.sort(np.random.random(10_000))  # evaluated_alone

    begin()
    evaluate_all()


def stopped() -> None:
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)


def infinite_loop() -> None:
    begin()
    number = 0
    while True: number += 1  # noqa: E701  # infinite_loop


def lock_held_in_c() -> None:
    begin()
    ctypes.PyDLL(None).sleep(600)  # lock_held_in_c


def exception() -> None:
    begin()
    raise ValueError("image 17 cannot be read")  # exception


def ended_early() -> None:
    begin()
    sys.exit(0)


def killed() -> None:
    begin()
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk() -> None:
    begin()
    with open(HERE / "disk" / "checkpoint", "wb") as file:
        while True:
            file.write(bytes(1 << 20))  # full_disk


def fifo() -> None:
    os.mkfifo(HERE / "samples")
    begin()
    open(HERE / "samples").read()  # noqa: SIM115  # fifo


def file_lock() -> None:
    path = HERE / "cache.lock"
    path.touch()
    other = subprocess.Popen(["flock", str(path), "sh", "-c", "echo; sleep 600"], stdout=subprocess.PIPE)
    assert other.stdout
    other.stdout.readline()
    with open(path) as file:
        begin()
        fcntl.flock(file, fcntl.LOCK_EX)  # file_lock


def full_shared_memory() -> None:
    memory = SharedMemory(create=True, size=1 << 30)
    begin()
    np.frombuffer(memory.buf, np.uint8)[:] = 1  # full_shared_memory


def data_cut_short() -> None:
    path = HERE / "data"
    path.write_bytes(bytes(1 << 20))
    data = np.memmap(path, mode="r")
    begin()
    os.truncate(path, 4096)
    data.copy()  # data_cut_short


def out_of_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    begin()
    np.ones(1 << 28)  # out_of_memory


def killed_for_memory() -> None:
    begin()
    np.ones(1 << 28)


def deadlocked_threads() -> None:
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def prefetch() -> None:
        with second:
            both.wait()
            with first:  # in the other thread
                pass

    threading.Thread(target=prefetch, name="prefetch", daemon=True).start()
    with first:
        both.wait()
        begin()
        second.acquire()  # deadlocked_threads


def silent_server() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    (HERE / "port").write_text(str(server.getsockname()[1]))
    begin()
    client.recv(1)  # silent_server


def no_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        begin()
        server.accept()  # no_client


def model_from_fifo() -> None:
    import torch

    os.mkfifo(HERE / "model")
    begin()
    torch.load(HERE / "model")  # model_from_fifo


def endless_child() -> None:
    begin()
    subprocess.run(["sleep", "600"], check=True)  # endless_child


def uninterruptible() -> None:
    """Sleep as in a file system that does not respond: until a child made by vfork starts its program."""
    os.mkfifo(HERE / "stdin")
    begin()
    stdin = (os.POSIX_SPAWN_OPEN, 0, str(HERE / "stdin"), os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[stdin])  # uninterruptible


def forked_child() -> None:
    def work() -> None:
        reduce("loss of a child")  # forked_child

    begin()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()


def log() -> None:
    reduce("log")  # branch


def evaluate() -> None:
    reduce("accuracy")  # forgotten_join


def disturbed(cause: str) -> None:
    """Run a cause that lies in the calls that the ranks make."""
    mine = hvd.rank() == 1
    if mine:
        begin()
    if cause == "swapped":
        if mine:
            reduce("b")  # swapped
        reduce("a")
        reduce("b")
    elif cause == "branch":
        if mine:
            log()
        reduce("loss")  # in the others
    elif cause == "shapes":
        hvd.allreduce(np.ones(1000 + mine), name="features")  # shapes
    elif cause == "forgotten_join":
        if not mine:
            reduce("loss")
            hvd.join()
        evaluate()
    elif cause == "batches":
        for _ in range(0 if mine else 2):
            reduce("loss")
        hvd.barrier()  # batches


IN_ALL_RANKS = ("swapped", "branch", "shapes", "forgotten_join", "batches")


def main() -> None:
    cause = sys.argv[1]
    hvd.init()
    for _ in range(STEPS):
        time.sleep(0.02)
        reduce("loss")
    if cause in IN_ALL_RANKS:
        disturbed(cause)
    elif hvd.rank() == 1:
        call: Callable[[], None] = globals()[cause]
        call()
    reduce("loss")


if __name__ == "__main__":
    main()
