"""Run the tasks of a preparation in this process or in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ringdance.data.prepare.progress import PrepareProgress, say
from ringdance.errors import ArgumentError

Work = Callable[..., tuple[int, int]]
"""Runs a task, given its arguments. Returns the number of its samples, and their size in bytes."""


def run_tasks(
    work: Work, tasks: Sequence[tuple[Any, ...]], processes: int, progress: PrepareProgress
) -> None:
    """Run all tasks, in any order.

    Args:
        work: A module-level function that runs a task. After an interruption, it is called again.
        tasks: The arguments of each task.
        processes: Maximum number of processes. If 1, the tasks run in this process.
        progress: Shows how much of the work is finished.

    Raises:
        ArgumentError: A task raised it, or a process was killed. The other processes are stopped first.
    """
    try:
        with progress:
            if processes == 1 or len(tasks) < 2:
                for task in tasks:
                    progress.add(*work(*task))
            else:
                _run_in_pool(work, tasks, min(processes, len(tasks)), progress)
    except BaseException:
        say("Stopped. The same command resumes the run and keeps all complete files.")
        raise


def _run_in_pool(
    work: Work, tasks: Sequence[tuple[Any, ...]], processes: int, progress: PrepareProgress
) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin) as pool:
        try:
            for done in as_completed([pool.submit(work, *task) for task in tasks]):
                progress.add(*done.result())
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise ArgumentError(
                    "a process was killed. If memory ran out, use fewer processes (-np)."
                ) from None
            raise


def _begin() -> None:
    """Make a worker process exit when its parent does, and exit without a traceback on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
