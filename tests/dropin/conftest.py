"""One job of two ranks for the tests of several files, because importing frameworks is slow on each rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from script_jobs import LIMIT, Outcome, Task, run_together

# PyTorch's optimizers come first, because some builds cannot import them after TensorFlow.
LATER = re.compile(
    r"^\s*(?:import|from) (?:tensorflow|keras|jax|(?:ringdance|horovod)\.(?:tensorflow|keras|jax))", re.M
)


@pytest.fixture(scope="session")
def shared_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Return the outcome of each task of all collected files, by name.

    A file provides its tasks through a function ``on_two_ranks(directory)``.
    """
    modules = {
        module.__name__: module for item in request.session.items if (module := getattr(item, "module", None))
    }
    tasks: dict[str, Task] = {}
    for name in sorted(modules):
        if hasattr(modules[name], "on_two_ranks"):
            tasks |= modules[name].on_two_ranks(tmp_path_factory.mktemp(name))

    def later(task: Task) -> bool:
        return bool(LATER.search(task.text or Path(task.script).read_text()))

    tasks = {name: task for when in (False, True) for name, task in tasks.items() if later(task) is when}
    return run_together("horovodrun", 2, tasks, 3 * LIMIT)
