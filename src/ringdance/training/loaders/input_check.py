"""Measure the input of a job: the loader alone, the step alone, and both. See ``ringdance bench input``."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringdance import settings as settings_module
from ringdance.core.monitor.core_use import CoreUse
from ringdance.core.monitor.sampler import ProcessUse
from ringdance.errors import ArgumentError
from ringdance.training import session
from ringdance.training.gradients.cores import own_cores
from ringdance.training.objects import allgather_json

__all__ = ["watch_input"]

# Prefix of the line on stdout in which rank 0 reports the metrics, as JSON, to `ringdance bench input`.
INPUT_MARK = "::ringdance-input::"
_LEAST = 3  # Minimum number of batches, both in the warm-up and in the measurement.
_UNITS = {"images": "images", "ids": "rows"}  # Maps a batch's attribute to the unit of its samples.
_KEPT, _KEPT_BYTES = 48, 1 << 28  # Maximum number and size of batches kept to measure the step alone.
# Quantiles of Student's t for 95% confidence and 1, 2, ... degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_WARM_UP = 0.3  # Duration of the warm-up, as a fraction of the measurement's duration.


def watch_input(loader: Any) -> Any:
    """Return a training loader in a form that ``ringdance bench input`` can measure.

    ::

        loader = hvd.watch_input(DataLoader(data, batch_size=32))

    Outside that command, the loader itself is returned. All ranks must iterate over the result, or pass it to
    ``fit`` in Keras. Loaders from ``image_loader`` and ``table_loader`` that shuffle do not need this call.

    Args:
        loader: Any object that can be iterated over several times: a DataLoader, a tf.data pipeline, a list.
    """
    settings = settings_module.load()
    if settings.input_check == "off":
        return loader
    return WatchedLoader(loader, settings.input_check, settings.input_check_time)


class WatchedLoader:
    """A loader with an endless epoch that stops the script once the loader is measured.

    Args:
        loader: Loader to measure. Attributes missing from this class are looked up in the loader.
        part: What to measure: "loader" (drops the batches), "step" (repeats the first batches) or "both".
        seconds: Length of the measurement in seconds, after a warm-up.
    """

    _measured: WatchedLoader | None = None  # The first loader to be iterated over.

    def __init__(self, loader: Iterable[Any], part: str, seconds: float) -> None:
        self.source, self.part, self._seconds = loader, part, seconds
        self._batches = self._samples = 0
        self._next, self._warm, self._unit = _LEAST, False, "samples"
        self._kept: Iterator[Any] | None = None
        self._full: Any = None
        self._times: list[float] = []  # Times at the start and after each batch.
        self._process = ProcessUse(os.getpid())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # Raises TypeError if the source has no length.

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until all ranks are measured. Then raise ``SystemExit(0)`` on all ranks."""
        if not self.begin():
            yield from self.source
            return
        for batch in self.drawn():
            number = samples_of(batch)
            if self.part != "loader":
                yield batch
            self.count(number)

    def batches(self) -> Iterator[Any]:
        """Yield the same batches as ``__iter__``, for training loops that call ``batches()``."""
        return iter(self)

    def begin(self) -> bool:
        """Return True if this loader is the one to measure: the first that is iterated over."""
        if WatchedLoader._measured is None:
            WatchedLoader._measured = self
            self._start()
        return WatchedLoader._measured is self

    def _start(self) -> None:
        """Start measuring."""
        pids = session.engine().local_pids if session.is_initialized() else ()
        self._times, self._cpu, self._host = [time.perf_counter()], self._cpu_seconds(), CoreUse(pids)

    def _cpu_seconds(self) -> float:
        return float(self._process.sample()["cpu_seconds"])

    def count(self, samples: int) -> None:
        """Count a processed batch. After the last one, raise ``SystemExit(0)`` on all ranks."""
        self._samples += samples
        self._batches += 1
        self._times.append(time.perf_counter())
        if self._batches >= self._next and self._is_complete():
            self._report()
            raise SystemExit(0)

    def drawn(self) -> Iterator[Any]:
        """Yield batches forever. If only the step is measured, the first batches are repeated."""
        if self.part == "step":
            if self._kept is None:
                self._kept = itertools.cycle(list(self._first()))  # Collect them before the clock starts.
                self._start()
            yield from self._kept
        while True:
            yield from self._epoch()

    def _epoch(self) -> Iterator[Any]:
        """Yield only full batches, because a framework may compile the step again for a short one."""
        batch = None
        for batch in self.source:
            self._unit = next((word for name, word in _UNITS.items() if hasattr(batch, name)), "samples")
            count = getattr(batch, "count", None)  # Counts all ranks, so all skip the same batches.
            self._full = count if self._full is None else self._full
            if count == self._full or not isinstance(count, int):
                yield batch
        if batch is None:
            raise ArgumentError(f"{self.source!r} has no batches, so there is nothing to measure.")

    def _first(self) -> Iterator[Any]:
        """Yield the batches for measuring the step alone: more than fit into caches, as in training.

        Collecting them takes no longer than the measurement, so a slow loader provides fewer. The time that
        workers need to start is not counted.
        """
        room, until = _KEPT_BYTES, math.inf
        for batch in itertools.islice(self._epoch(), _KEPT):
            yield batch
            room, now = room - bytes_of(batch), time.perf_counter()
            until = min(until, now + self._seconds)
            if room <= 0 or now >= until:
                break

    def _is_complete(self) -> bool:
        """Return True if the measurement has lasted long enough. At the end of the warm-up, start measuring.

        If steps are measured, the ranks agree, because all must stop after the same step. The cost is
        negligible, because the intervals between agreements grow. Otherwise, the ranks wait for each other
        only at the end.
        """
        elapsed = time.perf_counter() - self._times[0]
        if self.part != "loader" and session.is_initialized():
            elapsed = max(allgather_json(elapsed, "ringdance.input_check.time"))
        limit = self._seconds * (1.0 if self._warm else _WARM_UP)
        if elapsed < limit:
            left = int((limit - elapsed) / elapsed * self._batches) if self.part != "loader" else 0
            self._next = self._batches + min(max(left, 1), self._batches)
            return False
        if not self._warm:
            self._warm, self._batches, self._samples = True, 0, 0
            self._next = _LEAST
            self._start()
            return False
        return True

    def _report(self) -> None:
        """Write all ranks' metrics to rank 0's stdout."""
        seconds, used = time.perf_counter() - self._times[0], self._cpu_seconds() - self._cpu
        row = {
            "unit": self._unit, "samples": self._samples, "seconds": round(seconds, 4),
            "noise": noise_of(self._times), "cores": round(used / seconds, 3),
            "usable": max(own_cores(), 1), "host_busy": round(self._host.share(), 3),
            "host": os.uname().nodename, "host_cores": self._host.cores,
        }  # fmt: skip
        rank, rows = 0, [row]
        if session.is_initialized():
            rank, rows = session.engine().rank, allgather_json(row, "ringdance.input_check.rows")
        if rank == 0:
            sys.stdout.flush()
            # Bypass sys.stdout, which the script may have redirected, and start on a new line.
            os.write(1, f"\n{INPUT_MARK}{json.dumps(rows)}\n".encode())


def noise_of(times: Sequence[float]) -> float:
    """Return the relative half-width of the 95% confidence interval of the mean time per batch.

    Args:
        times: Times at the start and after each batch. They are divided into up to ten parts, whose spread
            is measured.
    """
    edges = np.linspace(0, len(times) - 1, min(len(times), len(_T) + 2)).round().astype(int)
    each = np.diff(np.array(times)[edges]) / np.diff(edges)
    return float(round(_T[len(each) - 2] * each.std(ddof=1) / len(each) ** 0.5 / each.mean(), 4))


def bytes_of(batch: Any) -> int:
    """Return the size of a batch's arrays in bytes, or an upper bound."""
    if hasattr(batch, "shape"):  # TensorFlow tensors may lack ``nbytes``.
        return int(getattr(batch, "nbytes", 8 * math.prod(batch.shape)))
    parts = vars(batch) if hasattr(batch, "labels") else batch  # A batch of image_loader or table_loader.
    if isinstance(parts, Mapping | tuple | list):
        return sum(map(bytes_of, parts.values() if isinstance(parts, Mapping) else parts))
    return 0


def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch, which is the length of its first array or list."""
    if hasattr(batch, "labels"):  # A batch of image_loader or table_loader.
        batch = batch.labels
    elif isinstance(batch, Mapping) and batch:
        return samples_of(next(iter(batch.values())))
    elif isinstance(batch, tuple) and batch:
        return samples_of(batch[0])
    elif isinstance(batch, list) and batch and hasattr(batch[0], "shape"):
        return samples_of(batch[0])  # torch's DataLoader returns a list [inputs, targets].
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return len(batch) if hasattr(batch, "__len__") else 1
