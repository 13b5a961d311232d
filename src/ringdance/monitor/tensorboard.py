"""Write the figures of a host's ranks for TensorBoard, by tensorboardX: a run for each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

# tensorboardX imports these where they are installed: a second and 200 MB for nothing.
_without: dict[str, Any] = {name: None for name in ("boto3", "torch") if name not in sys.modules}
sys.modules.update(_without)
try:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
finally:
    for _name in _without:
        del sys.modules[_name]


_RATES = {
    "steps": "steps_per_second", "bytes": "bytes_per_second", "exposed_seconds": "exposed_share",
    "cpu_seconds": "cores",
}  # fmt: skip
_GAUGES = ("rss_bytes", "host_cpu_percent", "host_memory_percent", "gpu_percent", "gpu_memory_bytes")


class TensorBoard:
    """Event files of ranks.

    Args:
        directory: gets ``rank.<r>/events.out.tfevents.*``.
        interval: seconds; of two rows much closer than that the second is left out.
    """

    def __init__(self, directory: str, interval: float) -> None:
        self._directory, self._interval = directory, interval
        self._writers: dict[int, Any] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write what has changed since the last rows."""
        for row in rows:
            rank = row["rank"]
            last = self._last.get(rank)
            seconds = row["time"] - last["time"] if last else 0.0
            if last and seconds < self._interval / 2:
                continue
            self._last[rank] = row
            if rank not in self._writers:  # without SummaryWriter's queue, which loses events of a short run
                path = os.path.join(self._directory, f"rank.{rank}")
                os.makedirs(path, exist_ok=True)
                self._writers[rank] = EventsWriter(os.path.join(path, "events"))
            values = {name: row[name] for name in _GAUGES if name in row}
            if last:
                values |= {name: (row[key] - last[key]) / seconds for key, name in _RATES.items()}
            scalars = [Summary.Value(tag=f"ringdance/{name}", simple_value=v) for name, v in values.items()]
            event = Event(wall_time=row["time"], step=row["steps"], summary=Summary(value=scalars))
            self._writers[rank].write_event(event)
            self._writers[rank].flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
