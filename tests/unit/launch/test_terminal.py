"""Jobs that run in this terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringdance.launch import terminal
from ringdance.launch.hosts import Host


@pytest.mark.parametrize(("local", "said"), [(False, ["h2"]), (True, [])])
def test_a_file_that_rank_0_cannot_read_is_not_dropped_in_silence(
    local: bool, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "input").write_text("a line\n")
    plan = SimpleNamespace(hosts=[Host("h2", 1, (0,), local=local)])
    with (tmp_path / "input").open() as stdin:
        waits = terminal._waits(stdin.fileno())
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(terminal, "_waits", lambda descriptor: waits)
        monkeypatch.setattr(terminal, "Job", lambda *_, **__: SimpleNamespace(run=lambda: 0))
        prepared: Any = SimpleNamespace(plan=plan, spec=SimpleNamespace(verbose=False))
        assert terminal.run_in_terminal(prepared) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[6] for line in lines] == said, lines


def test_bytes_that_wait() -> None:
    """A shell passes a here-document as a pipe. The pipe of a service or of cron may stay empty forever."""
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb") as sender, open(os.devnull, "rb") as nothing:
        assert not terminal._waits(nothing.fileno())
        assert not terminal._waits(read)
        sender.write(b"import this")
        sender.flush()
        assert terminal._waits(read)
