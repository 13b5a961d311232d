"""Do the tasks of a preparation, by this process or by several."""

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
"""Does a task, given its arguments; returns how many samples that were, and their bytes."""


def run_tasks(
    work: Work, tasks: Sequence[tuple[Any, ...]], processes: int, progress: PrepareProgress
) -> None:
    """Do all tasks.

    Args:
        work: A function of a module. A task that was interrupted must be free to be done again.
        tasks: The arguments of each.
        processes: At most so many work at a time; 1: this one.
        progress: Counts what is done.

    Raises:
        ArgumentError: By a task, or a process was killed; the other processes have been ended.
    """
    try:
        with progress:
            if processes == 1 or len(tasks) < 2:
                for task in tasks:
                    progress.add(*work(*task))
            else:
                _run_in_pool(work, tasks, min(processes, len(tasks)), progress)
    except BaseException:
        say("Stopped. The same command resumes: files that are complete are not written again.")
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
                    "a process was killed. If the memory was full: fewer processes need less (-np)"
                ) from None
            raise


def _begin() -> None:
    """Let this process end with the one that started it, and at once by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
