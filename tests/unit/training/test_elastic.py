"""State and loop of elastic training, without a framework."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loopback_job import job

from ringdance.core.engine import Engine
from ringdance.errors import (
    ArgumentError,
    CollectiveError,
    HostsUpdatedInterrupt,
    MismatchError,
    NotInitializedError,
    ShutDownError,
)
from ringdance.training import elastic, session
from ringdance.training.elastic import ObjectState, State, run_fn


def alone(obj: Any) -> Any:
    return obj


def lone_state(**values: Any) -> ObjectState:
    return ObjectState(bcast_object=alone, get_rank=lambda: 0, **values)


# -- ObjectState ---------------------------------------------------------------------------------


def test_save_and_restore() -> None:
    state = lone_state(epoch=3, name="a")
    state.epoch, state.name = 4, "b"
    state.restore()
    assert (state.epoch, state.name) == (3, "a")  # the first values count as saved
    state.epoch = 5
    state.save()
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


def test_what_is_saved_does_not_change_with_the_attribute() -> None:
    def values() -> dict[str, Any]:
        return {
            "history": [1, {"loss": [2.0]}],
            "seen": {1, 2},
            "table": OrderedDict(a=[1]),
            "window": deque([1, 2], maxlen=2),
            "nested": ([1], "x"),
            "weights": np.arange(3.0),
            "raw": bytearray(b"ab"),
        }

    state = lone_state(**values())
    for _ in range(2):  # nor may a restore hand out the saved objects
        state.history.append(3)
        state.history[1]["loss"].append(4.0)
        state.seen.add(3)
        state.table["a"].append(2)
        state.window.append(3)
        state.nested[0].append(2)
        state.weights += 1
        state.raw[0] = 0
        state.restore()
        for name, value in values().items():
            restored = getattr(state, name)
            assert type(restored) is type(value), name
            assert np.array_equal(restored, value) if name == "weights" else restored == value, name
        assert state.window.maxlen == 2


def test_objects_of_other_classes_stay_the_same_objects() -> None:
    class Schedule:
        pass

    schedule = Schedule()
    state = lone_state(schedule=schedule, several=[schedule])
    state.save()
    state.restore()
    assert state.schedule is schedule
    assert state.several[0] is schedule


def test_an_attribute_with_the_name_of_a_method() -> None:
    with pytest.raises(ArgumentError, match="'commit' is a method"):
        lone_state(commit=1)


def test_sync_gives_present_and_saved_values_of_rank_0() -> None:
    def program(engine: Engine) -> tuple[Any, ...]:
        state = ObjectState(epoch=10 + engine.rank, history=[engine.rank])
        state.epoch += 100
        state.history.append(engine.rank)
        state.sync()
        present = state.epoch, state.history
        state.restore()
        return *present, state.epoch, state.history

    assert job(3, program) == [(110, [0, 0], 10, [0])] * 3


def test_a_state_without_attributes() -> None:
    state = ObjectState(bcast_object=lambda obj: pytest.fail("nothing to send"))
    state.sync()
    state.save()
    state.restore()


def test_a_bare_state_has_to_be_completed() -> None:
    for method in (State().save, State().restore, State().sync):
        with pytest.raises(NotImplementedError):
            method()
    State().reset()


# -- the loop ------------------------------------------------------------------------------------


class Diary(State):
    """A state that records its calls."""

    def __init__(self) -> None:
        super().__init__(alone, lambda: 0)
        self.lines: list[str] = []
        self.register_reset_callbacks([lambda: self.lines.append("first")])
        self.register_reset_callbacks([lambda: self.lines.append("second")])

    def save(self) -> None:
        self.lines.append("save")

    def restore(self) -> None:
        self.lines.append("restore")

    def sync(self) -> None:
        self.lines.append("sync")

    def reset(self) -> None:
        self.lines.append("reset")


def play(state: Diary, *acts: BaseException | Callable[[], object]) -> Any:
    """Run a function that performs the next action each time it is called."""
    remaining = list(acts)

    def func(state: Diary, word: str, *, number: int) -> str:
        """Told."""
        state.lines.append("call")
        act = remaining.pop(0)
        if isinstance(act, BaseException):
            raise act
        act()
        return f"{word} {number}"

    wrapped = run_fn(func, lambda: state.lines.append("restart"))
    assert wrapped.__doc__ == "Told."
    return wrapped(state, "done", number=7)


AGAIN = ["restart", "reset", "first", "second"]


def test_a_run_without_trouble() -> None:
    state = Diary()
    assert play(state, lambda: None) == "done 7"
    assert state.lines == ["sync", "call"]


def test_an_error_of_a_collective() -> None:
    state = Diary()
    assert play(state, MismatchError("x"), CollectiveError("y"), lambda: None) == "done 7"
    once = ["sync", "call", "restore", *AGAIN]
    assert state.lines == [*once, *once, "sync", "call"]


def test_hosts_that_changed() -> None:
    state = Diary()
    acts = [HostsUpdatedInterrupt(False), HostsUpdatedInterrupt(True), CollectiveError("x"), lambda: None]
    play(state, *acts)
    assert state.lines == [
        "sync", "call", *AGAIN,  # hosts were added: values are kept and synchronized
        "sync", "call", *AGAIN,  # hosts were only removed: not synchronized
        "call", "restore", *AGAIN,
        "sync", "call",
    ]  # fmt: skip


def test_an_error_while_synchronising() -> None:
    state = Diary()
    failing = [CollectiveError("x")]

    def sync() -> None:
        state.lines.append("sync")
        if failing:
            raise failing.pop()

    state.sync = sync  # type: ignore[method-assign]
    play(state, lambda: None)
    assert state.lines == ["sync", "restore", *AGAIN, "sync", "call"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), NotInitializedError("init first")])
def test_other_errors_are_raised(error: BaseException) -> None:
    state = Diary()
    with pytest.raises(type(error)):
        play(state, error)
    assert state.lines == ["sync", "call"]


def test_it_gives_up_without_a_commit() -> None:
    most = elastic.MOST_FAILURES
    state = Diary()
    errors = [CollectiveError(str(number)) for number in range(most + 1)]
    with pytest.raises(CollectiveError, match=str(most)) as caught:
        play(state, *errors)
    assert "Giving up" in caught.value.__notes__[0]
    assert state.lines.count("call") == most + 1
    assert state.lines.count("restore") == most


@pytest.mark.parametrize("how", ["commit", "save"])
def test_a_commit_begins_the_count_anew(how: str) -> None:
    state = lone_state(step=0)
    calls = 0

    def func(state: ObjectState) -> str:
        nonlocal calls
        calls += 1
        if calls % elastic.MOST_FAILURES == 0:
            getattr(state, how)()
        if calls < 3 * elastic.MOST_FAILURES:
            raise CollectiveError("again")
        return "done"

    assert run_fn(func, lambda: None)(state) == "done"


def test_people_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ringdance"):
        play(Diary(), MismatchError("shapes differ."), lambda: None)
    assert "MismatchError: shapes differ. All ranks are going back to the last commit" in caplog.text


def test_a_rank_that_has_ended_cannot_be_brought_back() -> None:
    """Rank 1's program ends, and rank 0 must not wait for it to come back."""

    def program(engine: Engine) -> str:
        if engine.rank == 1:
            engine.shutdown("has ended its program", departing=True)
            return ""
        state = ObjectState(step=0)

        def train(state: ObjectState) -> None:
            while True:
                state.commit()

        with pytest.raises(ShutDownError) as caught:
            run_fn(train, lambda: pytest.fail("it must not start again"))(state)
        assert session.engine().end.departed.startswith("rank 1 on host")
        return "".join(caught.value.__notes__)

    note = job(2, program)[0]
    assert "rank 1 on host" in note
    assert "cannot be restarted" in note


def test_a_rank_that_fails_with_an_error_of_its_own() -> None:
    def program(engine: Engine) -> None:
        if engine.rank == 1:
            engine.leave("ended with ValueError: x")
            return
        with pytest.raises(CollectiveError, match="ValueError") as caught:
            run_fn(lambda state: state.sync(), lambda: pytest.fail("again"))(ObjectState(step=0))
        assert "rank 1" in caught.value.__notes__[0]

    job(2, program)


def test_the_first_argument_must_be_a_state() -> None:
    @elastic.run
    def train(state: Any) -> None:
        pytest.fail("called")

    with pytest.raises(ArgumentError, match=r"train\(\) needs an elastic state.*got int"):
        train(3)
