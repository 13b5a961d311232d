"""What the doctor does while a user waits for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringdance.tools.doctor import gpu
from ringdance.tools.doctor.check import Usage


def test_frameworks_are_imported_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("torch", "tensorflow", "jax")
    # Each script waits until all three have started.
    text = (
        "import pathlib, time\ndirectory = pathlib.Path({directory!r})\n(directory / {own!r}).touch()\n"
        "until = time.monotonic() + 20\n"
        "while len(list(directory.iterdir())) < 3 and time.monotonic() < until: time.sleep(0.01)\n"
        "found = {{'in_time': time.monotonic() < until}}\n"
    )
    scripts = {name: text.format(directory=str(tmp_path), own=name) for name in names}
    monkeypatch.setattr(gpu, "_SCRIPTS", scripts)
    monkeypatch.setattr(gpu, "find_spec", lambda name: True)
    assert gpu.frameworks_facts(Usage())["of"] == {name: {"in_time": True} for name in names}


def test_a_terminal_shows_what_is_waited_for() -> None:
    ours, terminal = os.openpty()
    line = [sys.executable, "-m", "ringdance", "doctor", "--quick", "--check", "threads", "-H", "localhost"]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=False)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # at the end; one read may return only a part
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert b"checking localhost \x1b[33m0:00:00" in shown
    assert shown.endswith(b"\x1b[2K"), "the progress line must be erased"
    assert b"checking" not in done.stdout
    quiet = subprocess.run(line, capture_output=True, timeout=60, check=False)
    assert quiet.stderr == b""
