"""What a rank's wrapper finds out about a signal that has ended it."""

from __future__ import annotations

import signal

import pytest

from ringdance.launch.agent.rank import reason_of
from ringdance.launch.cause import Ended, of_end
from ringdance.launch.system import linux


def message(code: int, out_of_memory: bool = False) -> str:
    cause = of_end(Ended(0, "h", 100, code, 1.0, why=reason_of(code, out_of_memory)))
    assert cause
    return cause.message


@pytest.mark.parametrize(
    ("free", "said", "unsaid"),
    [
        (0, "/dev/shm is full (0 KiB free): there was no room", "cut short"),
        (5 << 20, "a file that it had mapped was cut short, or", "is full"),
        (5 << 20, "or /dev/shm was full, which has 5 MiB free now", "is full"),
        (-1, "a file that it had mapped was cut short, or", "is full"),
    ],
)
def test_a_bus_error_is_explained_by_the_room_that_is_left(
    monkeypatch: pytest.MonkeyPatch, free: int, said: str, unsaid: str
) -> None:
    monkeypatch.setattr(linux, "shared_memory", lambda: free)
    words = message(-signal.SIGBUS)
    assert words.startswith("killed by SIGBUS (signal 7): ")
    assert said in words
    assert unsaid not in words


def test_other_signals() -> None:
    assert message(-signal.SIGKILL).endswith("): by hand, or by the kernel for want of memory (see dmesg)")
    assert message(-signal.SIGKILL, True).endswith("the memory limit of its container (cgroup) was reached")
    assert message(-signal.SIGSEGV) == "killed by SIGSEGV (signal 11)"
    assert message(1, True) == "exited with code 1"
