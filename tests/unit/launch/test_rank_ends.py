"""What a rank's wrapper does about signals, and what it learns about a signal that has ended the rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from ringdance.host.agent.paths import bare_command
from ringdance.host.agent.rank import reason_of
from ringdance.host.directories import host_directory
from ringdance.host.messages import Channel
from ringdance.host.system import linux
from ringdance.launch.cause import Ended, of_end


def message(code: int, out_of_memory: bool = False) -> str:
    cause = of_end(Ended(0, "h", 100, code, 1.0, why=reason_of(code, out_of_memory)))
    assert cause
    return cause.message


@pytest.mark.parametrize(
    ("free", "said", "unsaid"),
    [
        (0, "/dev/shm is full (0 KiB free): there was no space", "was truncated"),
        (5 << 20, "a file that it had mapped was truncated or", "is full"),
        (5 << 20, "or /dev/shm was full (it has 5 MiB free now)", "is full"),
        (-1, "a file that it had mapped was truncated or", "is full"),
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
    why = "sent by a user, or by the kernel because memory had run out (see dmesg)"
    assert message(-signal.SIGKILL).endswith(f"): {why}")
    assert message(-signal.SIGKILL, True).endswith("because its container (cgroup) reached its memory limit")
    assert message(-signal.SIGSEGV) == "killed by SIGSEGV (signal 11)"
    assert message(1, True) == "exited with code 1"


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_has_got_no_signal_that_came_before_it(early: bool) -> None:
    """A rank gets a signal from its wrapper only if it had not started when all processes got it."""
    with tempfile.TemporaryDirectory(prefix="rdt-") as base, socket.socket(socket.AF_UNIX) as listener:
        directory = Path(host_directory(base, job := os.urandom(16).hex()))
        directory.mkdir(mode=0o700)
        listener.bind(str(directory / "s"))
        listener.listen()
        listener.settimeout(20)
        line = [*bare_command("agent.rank", base, job), "sleep", "5"]
        process = subprocess.Popen(line, env={**os.environ, "PMI_RANK": "0", "PMI_SIZE": "1"})
        channel = Channel(listener.accept()[0])
        channel.receive()
        supervisor = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        if early:
            os.kill(supervisor, signal.SIGTERM)
            time.sleep(0.1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        channel.send({"go": {"RANK": 0, "SIZE": 1}, "port": 0, "environ": {}}, [nothing])
        ((pid,), _, _), began = channel.receive(), time.monotonic()
        time.sleep(0.1)
        if not early:
            for receiver in (supervisor, pid["pid"]):
                os.kill(receiver, signal.SIGTERM)
        channel.send({"signal": int(signal.SIGTERM), "stay": 0.1})
        ((ended,), _, _) = channel.receive()
        assert ended["ended"] == -signal.SIGTERM
        assert time.monotonic() - began < 4.0
        os.close(nothing)
        channel.sock.close()
        process.wait(20)
