"""The Chrome trace of a few records."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringdance.core.monitor import tracefile
from ringdance.core.monitor.activities import activities, chunks_of
from ringdance.core.monitor.chrome import ChromeWriter
from ringdance.core.monitor.links import Clock
from ringdance.core.monitor.timeline import Timeline
from ringdance.core.recorder import Recorder
from ringdance.core.request import Collective
from ringdance.core.ring import MASK, Kind, RingReader, Who
from ringdance.tools.report import timeline
from ringdance.tools.report.summary import summarize
from ringdance.tools.report.trace import load

MS = 1_000_000


def recorded(sizes: Sequence[int], chunks: int) -> Recorder:
    """Return the records of one batch at 10 ms, with a tensor of each size submitted at 1, 2, ... ms."""
    recorder = Recorder()
    names = tuple(f"allreduce.t{number}" for number in range(len(sizes)))
    for number, (name, size) in enumerate(zip(names, sizes, strict=True), 1):
        label = recorder.ring.label(name)
        recorder.ring.add(Kind.SUBMIT, label, 0, size, 0, Collective.ALLREDUCE, when=number * MS)
    recorder.detail = 1
    # Copying in takes 1 ms. Each chunk then waits, copies out, reduces and copies in, 1 ms each.
    times = [10]
    for chunk in range(chunks):  # the next chunk starts when this one ends
        times += [11 + 4 * chunk + number for number in range(5)]
    times += [11 + 4 * chunks + number for number in range(3)]
    recorder.chunks(0, [time * MS for time in times], every=1)
    values = (1, 90_000, Collective.ALLREDUCE, sum(sizes))
    recorder.ring.add(Kind.BATCH, recorder.ring.label(names), 0, *values, when=100 * MS)
    return recorder


def written(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_a_trace_is_complete_after_every_flush(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Timeline(ChromeWriter(str(path), 0, 1.5))
    assert written(path)[0]["args"] == {"start_time_since_epoch_in_micros": 1_500_000}
    recorder = recorded([100, 300], chunks=2)
    reader = RingReader(recorder.ring.memory)
    for record in list(reader.read()):
        trace.add(Who(1, "node", 7), reader.name, [record])
        trace.writer.flush()
        events = written(path)
    trace.writer.close()
    named = [event for event in events if event["name"] == "process_name" and event["pid"]]
    tensors = {event["args"]["name"]: event["pid"] for event in named}
    assert "rank 1 on node (pid 7)" in tensors
    of_first = [event for event in events if event["pid"] == tensors["allreduce.t0"] and event["ph"] != "M"]
    assert [(event["name"], event["ph"], event["ts"]) for event in of_first] == [
        ("NEGOTIATE_ALLREDUCE", "B", 1000.0),
        ("1", "X", 1000.0),
        ("NEGOTIATE_ALLREDUCE", "E", 10_000.0),
        ("ALLREDUCE", "B", 10_000.0),
        ("MEMCPY_IN_FUSION_BUFFER", "X", 10_000.0),
        ("MPI_ALLREDUCE", "X", 13_000.0),
        ("MEMCPY_OUT_FUSION_BUFFER", "X", 14_000.0),
        ("ALLREDUCE", "E", 100_000.0),
    ]
    batch = next(event for event in events if event["ph"] == "X" and event["name"] == "ALLREDUCE")
    assert batch["args"] == {"round": 1, "bytes": 400, "tensors": 2, "process_set": 0}
    assert batch["dur"] == 90_000.0


def test_the_largest_size_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefile, "_RECORDS", 100)
    path, recorder = tmp_path / "trace.json", Recorder()
    trace, reader = tracefile.TraceFile(str(path)), RingReader(recorder.ring.memory)
    for number in range(100):
        recorder.ring.add(Kind.STEP, a=number, b=1)
        trace.add(reader, *reader.take(), reader.lost)
        trace.convert(everything=True)
    assert trace.full
    recorder.ring.add(Kind.STEP, a=100, b=1)
    trace.add(reader, *reader.take(), reader.lost)
    trace.close()
    names = [event["name"] for event in written(path)]
    assert "step 99" in names
    assert "step 100" not in names
    assert "maximum size" in names[-1]


def test_chunks_belong_to_the_tensors_in_them() -> None:
    recorder = recorded([100, 300], chunks=2)
    reader = RingReader(recorder.ring.memory)
    chunks = [record for record in reader.read() if record.kind == Kind.CHUNK]
    assert len(chunks) == 4
    first, second = activities(chunks_of(chunks), [100, 300])
    # Each chunk has 200 bytes. The first tensor is in the first chunk only, the second tensor in both.
    assert [(name, begin // MS, end // MS) for name, begin, end in first] == [
        ("MEMCPY_IN_FUSION_BUFFER", 10, 13),
        ("MPI_ALLREDUCE", 13, 14),
        ("MEMCPY_OUT_FUSION_BUFFER", 14, 17),
    ]
    assert [(name, begin // MS) for name, begin, _ in second] == [
        ("MEMCPY_IN_FUSION_BUFFER", 10),
        ("MPI_ALLREDUCE", 13),
        ("MEMCPY_OUT_FUSION_BUFFER", 18),
    ]
    assert activities([], [1, 2]) == [[], []]


def test_a_chunk_that_stands_for_several_fills_the_time_until_the_next() -> None:
    recorder = Recorder()
    # Waits 1 ms, copies out 2 ms, reduces 3 ms and copies in 4 ms. Repeats 20 ms later.
    times = [1, 2, 3, 5, 8, 12, 22, 23, 25, 28, 32, 42, 43, 44]
    recorder.chunks(0, [time * MS for time in times], every=2)
    converted = chunks_of(list(RingReader(recorder.ring.memory).read()))
    assert [chunk.time // MS for chunk in converted] == [1, 2, 22, 42]
    assert [duration / MS for duration in converted[1].durations] == [2, 4, 6, 8]
    assert [duration / MS for duration in converted[2].durations] == [2, 4, 6, 8]
    assert [duration / MS for duration in converted[3].durations] == [1, 1, 0, 0]


def test_records_that_are_lost_are_said_and_nothing_is_paired_over_the_gap(tmp_path: Path) -> None:
    """The trace has two ranks. The first one loses so many records that an exchange has no end."""
    path = tmp_path / "trace.json"
    trace = tracefile.TraceFile(str(path))
    began = time.monotonic_ns()
    for rank in range(2):
        recorder = Recorder()
        recorder.ring.describe(rank, 2, f"node{rank}")
        reader, label = RingReader(recorder.ring.memory), recorder.ring.label("t")
        for number in range(1, 41):
            at = began + 100 * number * MS
            recorder.ring.add(Kind.SUBMIT, label, 0, 8, 0, Collective.ALLREDUCE, when=at + 9 * rank * MS)
            if rank == 0 and number == 20:  # more than the ring holds; the exchange ends among them
                trace.add(reader, *reader.take(), reader.lost)
                for _ in range(MASK + 1000):
                    recorder.ring.add(Kind.TEXT, when=at + MS)
            else:
                recorder.ring.add(Kind.BATCH, label, 0, number, 0, Collective.ALLREDUCE, 8, when=at + 10 * MS)
            recorder.ring.add(Kind.STEP, a=number, b=1, when=at + 20 * MS)
        trace.add(reader, *reader.take(), reader.lost)
        if rank == 0:
            assert reader.lost > 1000
            lost = f"{reader.lost} of rank 0"
    trace.close()
    summary = summarize(load(path))
    assert len(summary["notes"]) == 1
    assert lost in summary["notes"][0]
    assert summary["unfinished"] == []
    assert [row["step"] for row in summary["steps"]] == [*range(2, 20), *range(21, 41)]
    (tensor,) = summary["tensors"]
    assert (tensor["late_rank"], tensor["late_share"], tensor["times"]) == (1, 1.0, 40)
    assert tensor["late_seconds"] == pytest.approx(39 * 0.009, rel=0.1)


def test_no_lateness_below_the_uncertainty_of_clocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks on two hosts submit 0.9 ms apart. Their clocks are known to within 1.1 ms or 0.2 ms."""
    for trip_ms, late in ((2.0, None), (0.2, 1)):
        path, clock = tmp_path / "trace.json", Clock()
        trace = tracefile.TraceFile(str(path))
        began = time.monotonic_ns()
        clock.answer(began, began + 7 * MS + int(trip_ms * MS / 2), began + int(trip_ms * MS))
        for rank in range(2):
            recorder = Recorder()
            recorder.ring.describe(rank, 2, f"node{rank}")
            reader, label = RingReader(recorder.ring.memory), recorder.ring.label("t")
            for number in range(1, 5):
                at = began + 10 * number * MS + 7 * MS * rank
                recorder.ring.add(
                    Kind.SUBMIT, label, 0, 8, 0, Collective.ALLREDUCE, when=at + rank * 9 * MS // 10
                )
                recorder.ring.add(Kind.BATCH, label, 0, number, 0, Collective.ALLREDUCE, 8, when=at + 5 * MS)
            trace.add(reader, *reader.take(), reader.lost, clock if rank else None)
        trace.close()
        summary = summarize(load(path))
        assert [row["late_rank"] for row in summary["tensors"]] == ([late] if late else [])
        assert timeline.main([str(path)]) == 0
        stdout = capsys.readouterr().out
        assert f"Clock accuracy: node1 to {trip_ms * 500 + 100:,.0f} us." in stdout
