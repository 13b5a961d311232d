"""Ranks that wait a long time for work that completes in the end, and ranks that can never continue.

Each rank waits for a different name than the others, on some thread. Only what other threads do, or will do,
shows that the job can continue.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

import ringdance.numpy as hvd
from ringdance.core.request import Collective, Description, ReduceOp, Request
from ringdance.training import session

SLEEP = "import time; time.sleep({:g}); print(1, flush=True)"


def reduce(name: str, **options: Any) -> Any:
    return hvd.allreduce(np.ones(3), name=name, **options)


def start(function: Callable[[], Any]) -> Future[Any]:
    """Call a function on its own thread."""
    result = Future[Any]()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def crossed(work: Callable[[], Any], elsewhere: bool = False) -> None:
    """Make each rank wait for a name that the other ranks submit only after long work.

    Args:
        work: Long work, done on the main thread while another thread waits.
        elsewhere: If True, a thread that has never called the engine works, and the main thread waits.
    """
    names = [f"of {rank}" for rank in range(hvd.size())]
    own = names.pop(hvd.rank())

    def others() -> None:
        work()
        for handle in [reduce(name, wait=False) for name in names]:
            hvd.synchronize(handle)

    first, second = (others, lambda: reduce(own)) if elsewhere else (lambda: reduce(own), others)
    result = start(first)
    second()
    result.result()


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


def in_c(seconds: float) -> None:
    """Compute in C code that has released Python's lock."""
    until, matrix = time.monotonic() + seconds, np.ones((500, 500))
    while time.monotonic() < until:
        matrix @ matrix


def child(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", SLEEP.format(seconds)], stdout=subprocess.DEVNULL, check=True)


def pipe(seconds: float) -> None:
    """Read data that another process sends late, like a data service."""
    command = [sys.executable, "-c", SLEEP.format(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        assert sender.stdout.read() == b"1\n"


def reader(seconds: float) -> None:
    """Wait for a queue that a thread with such a pipe fills."""
    items: queue.Queue[None] = queue.Queue()
    start(lambda: items.put(pipe(seconds)))
    items.get()


def other_process(seconds: float) -> None:
    """Wait for a lock that another process releases. It is a futex, like the locks within this process."""
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    if os.fork() == 0:
        time.sleep(seconds)
        lock.release()
        os._exit(0)
    lock.acquire()
    os.wait()


def lock(seconds: float) -> None:
    """Wait for a Python lock that a thread releases later."""
    held = threading.Lock()
    held.acquire()
    threading.Timer(seconds, held.release).start()
    with held:
        pass


def limited_lock(seconds: float) -> None:
    threading.Event().wait(seconds)


def c_thread(seconds: float) -> None:
    """Wait in C for a C thread that sleeps."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(max(1, round(seconds))))
    libc.pthread_join(thread, None)


class _Notification(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("kind", ctypes.c_int),
        ("function", ctypes.c_void_p), ("rest", ctypes.c_void_p * 5),
    )  # fmt: skip


def c_timer(seconds: float) -> None:
    """Wait in C for a C thread that does not exist yet, the way a graph waits for its data."""
    libc, timer, semaphore = ctypes.CDLL(None), ctypes.c_void_p(), (ctypes.c_long * 4)()
    function = ctypes.cast(libc.sem_post, ctypes.c_void_p)
    on_thread = _Notification(value=ctypes.addressof(semaphore), kind=2, function=function)
    libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(on_thread), ctypes.byref(timer))
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9)), None)
    libc.sem_wait(semaphore)


def sleep_in_steps(seconds: float) -> None:
    for _ in range(20):
        time.sleep(seconds / 20)


def debugger(seconds: float) -> None:
    """Wait at a debugger's prompt."""
    import pdb

    commands, keys = os.pipe()
    start(lambda: (time.sleep(seconds), os.write(keys, b"continue\n")))
    with open(commands) as stdin, open(os.devnull, "w") as stdout:
        pdb.Pdb(stdin=stdin, stdout=stdout).set_trace()
        time.sleep(0)
    os.close(keys)


WORK = (
    time.sleep, sleep_in_steps, compute, in_c, child, pipe, reader, other_process, lock, limited_lock,
    c_thread, c_timer, debugger,
)  # fmt: skip


def late_result(seconds: float) -> None:
    """Rank 0 evaluates on a thread. Its main thread is already waiting for what follows the result."""
    if hvd.rank() == 0:
        evaluation = start(lambda: (sleep_in_steps(seconds), reduce("result")))
        reduce("done")
        evaluation.result()
    else:
        reduce("result")
        reduce("done")


def threads_come_and_go(seconds: float) -> None:
    """No thread that has submitted is still alive, except those that are waiting."""
    for _ in range(3):
        start(lambda: reduce("step")).result()
    with ThreadPoolExecutor(2) as idle:
        idle.submit(int).result()
        crossed(lambda: time.sleep(seconds), elsewhere=True)


def limited_wait(seconds: float) -> None:
    """Rank 0 stops waiting after a timeout, and submits what the others are waiting for."""
    if hvd.rank() == 0:
        late = session.engine().submit(request_for("late"))
        try:
            late.wait(seconds)
        except TimeoutError:
            pass
        reduce("early")
        late.wait()
    else:
        reduce("early")
        reduce("late")


def request_for(name: str) -> Request:
    description = Description(Collective.ALLREDUCE, ("float64",), ((3,),), ReduceOp.AVERAGE)
    return Request(description, (np.ones(3),), name=f"allreduce.{name}")


def one_of_two_gives_up(seconds: float) -> None:
    """Two threads wait for the same Work, and one of them stops waiting early."""
    name = "a" if hvd.rank() else "b"
    work = session.engine().submit(request_for(name))
    stays = start(work.wait)
    try:
        work.wait(seconds / 4)
    except TimeoutError:
        time.sleep(seconds)
    reduce("b" if hvd.rank() else "a")
    stays.result()


def others_in_a_set(seconds: float) -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        until = time.monotonic() + seconds
        while hvd.allreduce(np.array([time.monotonic() < until]), op=hvd.Min, process_set=pair)[0]:
            pass
    reduce("all")
    hvd.remove_process_set(pair)


def one_in_a_set_is_late(seconds: float) -> None:
    """All ranks wait in two sets for a rank on which only a thread other than the main one has made calls."""
    sets = [hvd.add_process_set([rank, hvd.size() - 1]) for rank in range(hvd.size() - 1)]
    if hvd.rank() == hvd.size() - 1:
        waits = start(lambda: reduce("all"))
        time.sleep(seconds)
        for pair in sets:
            hvd.barrier(pair)
    else:
        hvd.barrier(sets[hvd.rank()])
        waits = start(lambda: reduce("all"))
    waits.result()
    for pair in sets:
        hvd.remove_process_set(pair)


def sets_change(seconds: float) -> None:
    """Sets are created and removed while other threads wait."""

    def change() -> None:
        until, go_on = time.monotonic() + seconds, np.ones(1)
        while go_on[0]:
            added = hvd.add_process_set(range(hvd.size() - 1))
            hvd.remove_process_set(added)
            go_on = hvd.broadcast(np.array([time.monotonic() < until]), 0, name="again")

    crossed(change)


def joined(seconds: float) -> None:
    """One rank has no more data, one evaluates, and one continues to train."""
    if hvd.rank() == 1:
        sleep_in_steps(seconds)
    if hvd.rank() != 0:
        reduce("more")
    hvd.join()


def joined_with_threads(seconds: float) -> None:
    """Ranks wait in a set while main threads wait in join, or have not called it yet."""
    pair = hvd.add_process_set([1, 2])
    waits = None
    if hvd.rank() == 1:
        waits = start(lambda: hvd.barrier(pair))
    if hvd.rank() == 2:
        time.sleep(seconds)
        hvd.barrier(pair)
    hvd.join()
    if waits is not None:
        waits.result()
    hvd.remove_process_set(pair)


def marked(seconds: float) -> None:
    if hvd.rank() == 0:
        with hvd.pause_stall_check("evaluation", timeout=seconds / 2):
            sleep_in_steps(seconds)
    crossed(int)


def large(seconds: float) -> None:
    """One exchange takes long while threads are waiting for other names."""

    def exchange() -> None:
        until, go_on, values = time.monotonic() + seconds, np.ones(1), np.ones(1 << 24)
        while go_on[0]:
            hvd.allreduce(values, name="large", out=values)
            go_on = hvd.broadcast(np.array([time.monotonic() < until]), 0, name="again")

    crossed(exchange)


def restarted(seconds: float) -> None:
    """New engines start while threads of the old ones fail. Then a rank is late."""
    waits = start(lambda: reduce(f"never {hvd.rank()}"))
    hvd.barrier()
    hvd.shutdown()
    with contextlib.suppress(Exception):
        waits.result()
    time.sleep(seconds * (os.getpid() % 2))
    hvd.init()
    crossed(lambda: time.sleep(seconds))


def stopped(seconds: float) -> None:
    """A rank is stopped by SIGSTOP, as by an attaching debugger."""

    def stop() -> None:
        if hvd.rank() == 0:
            wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], stdout=subprocess.DEVNULL)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGSTOP)

    crossed(stop)


def in_a_signal(seconds: float) -> None:
    """A slow signal handler, called while the main thread waits, submits what the others are waiting for."""
    handles = []

    def handler(number: int, frame: object) -> None:
        time.sleep(seconds)
        handles.append(reduce("of the handler", wait=False))

    if hvd.rank() == 0:
        previous = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        reduce("of the main thread")
        hvd.synchronize(handles[0])
        signal.signal(signal.SIGALRM, previous)
    else:
        reduce("of the handler")
        reduce("of the main thread")


def asleep_in_c(seconds: float) -> Any:
    """Return a TensorFlow data set whose source is slow, in C++."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    return tf.data.Dataset.range(1).apply(testing.sleep(round(1e6 * seconds)))


def graph(seconds: float) -> None:
    """TensorFlow computes, then waits for data, entirely in C++."""
    import tensorflow as tf

    @tf.function
    def evaluate(until: Any) -> Any:
        value = tf.ones((300, 300))
        while tf.timestamp() < until:
            value = tf.matmul(value, value) / 300.0
        return tf.reduce_sum(value), tf.data.experimental.get_single_element(asleep_in_c(seconds))

    crossed(lambda: evaluate(tf.timestamp() + seconds / 2))


def data_service(seconds: float) -> None:
    """Wait for batches from a TensorFlow data service."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    config = service.WorkerConfig(dispatcher_address=dispatcher.target.partition("://")[2])
    worker = service.WorkerServer(config)
    batches = asleep_in_c(seconds).apply(service.distribute("parallel_epochs", dispatcher.target))
    crossed(lambda: list(batches), elsewhere=True)
    del worker


def jitted(seconds: float) -> None:
    """JAX computes while main threads are already waiting, and then calls back."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def evaluate(value: Any) -> Any:
        return jax.lax.fori_loop(0, round(3000 * seconds), lambda i, v: v @ v / 300.0, value)

    evaluate(jnp.ones((2, 2)))
    crossed(lambda: evaluate(jnp.ones((300, 300))).block_until_ready())


def loader(seconds: float) -> None:
    """A PyTorch data loader with slow workers."""
    import torch

    class Slow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            time.sleep(seconds)
            return index

    crossed(lambda: list(torch.utils.data.DataLoader(Slow(), num_workers=1)))


LONG: dict[str, Callable[[float], None]] = {
    **{f"{work.__name__}": lambda seconds, work=work: crossed(lambda: work(seconds)) for work in WORK},
    **{f"{work.__name__} elsewhere": lambda seconds, work=work: crossed(lambda: work(seconds), elsewhere=True)
       for work in WORK if work is not debugger},
    **{kind.__name__: kind for kind in (
        late_result, threads_come_and_go, limited_wait, one_of_two_gives_up, others_in_a_set,
        one_in_a_set_is_late, sets_change, joined, joined_with_threads, marked, large, restarted, stopped,
        in_a_signal, graph, data_service, jitted, loader,
    )},
}  # fmt: skip


def swapped() -> None:
    for name in ("a", "b") if hvd.rank() else ("b", "a"):
        reduce(name)


def on_threads() -> None:
    """Main threads wait for threads that wait for each other. Other threads are idle."""
    items: queue.Queue[int] = queue.Queue()
    start(items.get)
    with ThreadPoolExecutor(2) as idle:
        idle.submit(int).result()
        start(swapped).result()


def in_a_graph() -> None:
    """In TensorFlow's graph, one rank's gradient is dense while the others' gradients are rows."""
    import tensorflow as tf

    import ringdance.tensorflow as hvd_tf

    @tf.function
    def step() -> Any:
        rows = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 1]), tf.constant([4, 3]))
        return hvd_tf.allreduce(rows if hvd.rank() else tf.ones((4, 3)), name="gradient")

    step()


FOR_EVER: dict[str, Callable[[], None]] = {kind.__name__: kind for kind in (swapped, on_threads, in_a_graph)}


def main() -> None:
    seconds, *kinds = sys.argv[1:]
    hvd.init()
    for kind in kinds:
        if kind in FOR_EVER:
            FOR_EVER[kind]()
        else:
            LONG[kind](float(seconds))
            hvd.barrier()
        if hvd.rank() == 0:
            print(f"{kind}: ok", flush=True)


if __name__ == "__main__":
    main()
