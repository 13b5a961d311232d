"""A host's monitor as seen by the rank that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringdance.core.monitor.chrome import END
from ringdance.core.monitor.client import MonitorClient
from ringdance.core.ring import Ring, Word, shared_memory
from ringdance.tools.report.summary import summarize
from ringdance.tools.report.trace import load


def test_hosts_whose_monitors_never_connect_are_named_in_the_file(tmp_path: Path) -> None:
    ring = Ring(shared_memory())
    ring.describe(0, 3, "node1")
    client = MonitorClient([os.getpid()], metrics=False)
    client.listen(others=2)
    client.start(str(tmp_path / "timeline.json"), 1)
    ring.words[Word.CLOSED] = 1
    client.close()
    names = [event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())]
    assert names[-1] == f"{END}the ranks on 2 other hosts: no monitor has connected from there"


RANK = """
import sys, time
from ringdance.core.ring import Kind, Ring, Word, shared_memory
rank = int(sys.argv[1])
ring = Ring(shared_memory())
ring.describe(rank, 2, f"node{rank}")
print("ready", flush=True)
sys.stdin.readline()
time.sleep(0.02 * rank)  # late by more than the clocks' uncertainty
for number in range(1, 20):
    ring.add(Kind.SUBMIT, ring.label("t"), 0, 8)
    time.sleep(0.05)
    ring.add(Kind.BATCH, ring.label("t"), 0, number, 0, 0, 8)
ring.words[Word.CLOSED] = 1
sys.stdin.readline()
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_a_timeline_of_two_monitors_says_how_well_the_clocks_are_known(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank)], stdin=-1, stdout=-1, bufsize=0)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout.readline() == b"ready\n"
        writer, other = (MonitorClient([process.pid], metrics=False) for process in ranks)
        writer.start(str(tmp_path / "t.json"), 1, anew=False)
        other.connect(**writer.listen(1))
        for process in ranks:
            process.stdin.write(b"\n")
        for process in ranks:
            process.stdin.write(b"\n")
        for process in ranks:
            process.wait()
        other.close()
        writer.close()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    summary = summarize(load(tmp_path / "t.json"))
    assert {row["rank"]: bool(row["clock_uncertainty"]) for row in summary["ranks"]} == {0: False, 1: True}
    assert summary["ranks"][0]["records_lost"] == 0
    assert [note.partition(" to ")[0] for note in summary["notes"]] == ["Clock accuracy: node1"]
    assert summary["tensors"][0]["times"] == 19
