"""Traces in Perfetto's format, read by Perfetto's own classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdance.monitor.perfetto import PerfettoWriter

trace_module = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


def test_packets_are_perfettos(tmp_path: Path) -> None:
    path = tmp_path / "trace.perfetto-trace"
    writer = PerfettoWriter(str(path))
    writer.process(5, "tensor ä", -3)
    writer.thread(5, 1, "rank 1")
    writer.begin(5, 1, "NEGOTIATE", 1_000)
    writer.end(5, 1, "NEGOTIATE", 2_000, bytes=1 << 40)
    writer.span(5, 1, "COPY", 2_000, 3_000, round=7)
    writer.span(5, 1, "1", 3_000, 3_000)
    writer.close()
    trace = trace_module.Trace()
    trace.ParseFromString(path.read_bytes())
    process, thread, *events = trace.packet
    assert process.track_descriptor.name == "tensor ä"
    assert process.track_descriptor.sibling_order_rank == -3
    assert thread.track_descriptor.parent_uuid == process.track_descriptor.uuid
    kinds = trace_module.TrackEvent
    assert [(one.timestamp, one.track_event.type, one.track_event.name) for one in events] == [
        (1_000, kinds.TYPE_SLICE_BEGIN, "NEGOTIATE"),
        (2_000, kinds.TYPE_SLICE_END, ""),
        (2_000, kinds.TYPE_SLICE_BEGIN, "COPY"),
        (3_000, kinds.TYPE_SLICE_END, ""),
        (3_000, kinds.TYPE_INSTANT, "1"),
    ]
    assert {one.track_event.track_uuid for one in events} == {thread.track_descriptor.uuid}
    (note,) = events[1].track_event.debug_annotations
    assert (note.name, note.int_value) == ("bytes", 1 << 40)
    assert {one.trusted_packet_sequence_id for one in trace.packet} == {1}
