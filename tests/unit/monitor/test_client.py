"""The monitor of a host, as the rank that starts it sees it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ringdance.core.ring import Ring, Word, shared_memory
from ringdance.monitor.client import MonitorClient


def test_hosts_whose_monitors_never_connect_are_counted(tmp_path: Path) -> None:
    ring = Ring(shared_memory())
    ring.describe(0, 3, "node1")
    client = MonitorClient([os.getpid()], metrics=False)
    client.listen(others=2)
    client.start(str(tmp_path / "timeline.json"), 1)
    ring.words[Word.CLOSED] = 1
    assert client.close() == 2
    json.loads((tmp_path / "timeline.json").read_text())
