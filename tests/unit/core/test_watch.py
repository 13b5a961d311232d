"""What is said of a stall, for each thing that the others may be doing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ringdance.core.watch import main_thread_place, stall_message
from ringdance.transport.base import Identity

WHO = tuple(Identity(rank, f"host{rank // 2}", 100 + rank) for rank in range(4))
OWN = {"where": "train.py:7 in step", "waiting": True}


def answer(*names: str, waiting: bool = True, joined: bool = False) -> dict[str, Any]:
    return {
        "pending": [[0, name] for name in names],
        "waiting": waiting,
        "joined": joined,
        "where": "other.py:9 in f",
    }


def message(answers: dict[int, dict[str, Any]], states: dict[int, str] | None = None) -> str:
    return stall_message(
        WHO, 1, OWN, 12.4, "grad", 0, [0, 2, 3], answers, states or dict.fromkeys(range(4), "running")
    )


def test_names_on_both_sides_with_lines() -> None:
    said = message({0: answer("grad"), 2: answer("grad"), 3: answer("loss", "metric")})
    assert said.startswith("rank 1 on host host0 (pid 101) has waited 12 s for 'grad'")
    assert "train.py:7 in step" in said
    assert (
        "rank 3 on host host1 (pid 103): it waits for 'loss', 'metric'; its main thread is at other.py:9 in f"
        in said
    )
    assert "rank 0 " not in said
    assert "rank 2 " not in said


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (answer(waiting=False), "it does not wait for anything"),
        (answer("loss", waiting=False), "it has submitted 'loss'"),
        (answer(), "it waits in another set"),
        (answer(joined=True), "it has joined"),
        (answer(*map(str, range(9))), "'5' and 3 more"),
    ],
)
def test_what_another_rank_does(found: dict[str, Any], words: str) -> None:
    assert words in message({0: answer("grad"), 2: answer("grad"), 3: found})


@pytest.mark.parametrize(
    ("state", "words"), [("stopped", "is stopped"), ("gone", "is gone"), ("running", "does not answer")]
)
def test_a_rank_that_does_not_answer(state: str, words: str) -> None:
    said = message({0: answer("grad"), 2: answer("grad")}, {0: "running", 2: "running", 3: state})
    assert f"rank 3 on host host1 (pid 103): it{'s process' if state != 'running' else ''} {words}" in said


def test_the_same_name_in_another_set_does_not_count() -> None:
    other = {**answer(), "pending": [[5, "grad"]]}
    assert "rank 3" in message({0: answer("grad"), 2: answer("grad"), 3: other})


def test_all_have_submitted_it() -> None:
    said = message({place: answer("grad") for place in (0, 2, 3)})
    assert "All members have submitted it" in said


def test_what_was_submitted_and_is_not_waited_for() -> None:
    own = {**OWN, "waiting": False}
    states = dict.fromkeys(range(4), "running")
    said = stall_message(WHO, 1, own, 4.2, "grad", 3, [0], {0: answer(waiting=False)}, states)
    assert "rank 1 on host host0 (pid 101) submitted 4 s ago 'grad' in process set 3" in said


@pytest.mark.parametrize(
    ("name", "set_id", "told"),
    [
        ("grouped_allreduce.gradients.1a2b.0", 0, True),
        ("allreduce.loss", 0, True),
        ("allgather.rows", 0, False),  # joining would not help
        ("allreduce.loss", 2, False),
    ],
)
def test_what_to_do_where_a_rank_has_no_more_data(name: str, set_id: int, told: bool) -> None:
    idle = {**answer(waiting=False), "pending": []}
    states = dict.fromkeys(range(4), "running")
    said = stall_message(WHO, 1, OWN, 4.2, name, set_id, [0], {0: idle}, states)
    advised = "ends='pad'" in said and "hvd.join() after the last batch" in said
    assert advised is told


def test_place_of_the_main_thread_is_the_users_line() -> None:
    assert "test_watch.py:" in main_thread_place()


@pytest.mark.parametrize(
    ("path", "module", "users"),
    [
        ("/env/lib/python3.12/site-packages/torch/nn/linear.py", "torch.nn.linear", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml", False),
        (threading.__file__, "threading", False),
        ("<frozen runpy>", "runpy", False),
        ("/home/me/horovod/compat/src/horovod/torch/mpi_ops.py", "horovod.torch.mpi_ops", False),
        ("/home/me/src/ringdance/torch/operations.py", "ringdance.torch.operations", False),
        ("/home/me/ringdance/train.py", "__main__", True),
        ("/home/me/horovod/model.py", "model", True),
    ],
)
def test_libraries_are_not_the_users(path: str, module: str, users: bool) -> None:
    space: dict[str, Any] = {"__name__": module}
    exec(compile("def call(function):\n    return function()", path, "exec"), space)
    assert space["call"](main_thread_place).startswith(path if users else __file__)
