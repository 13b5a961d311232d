"""Shared code of the strategies in compare.py: the model's sizes and initial values, the clock, the curve.

compare.py runs it with `ringdance run` as each process of each strategy. Processes print their results as
lines of JSON after a mark, so that results arrive from all hosts without a shared file system.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from ringdance.data.tables.auc import auc
from ringdance.recipes import deepfm
from ringdance.recipes.deepfm import rates

Array = np.ndarray[Any, Any]
MARK = "::compare::"
# When to evaluate, as shares of a run's rows. All strategies use the same. The first ones are for strategies
# that are too slow to reach the later ones.
_MARKS = (1 / 64, 1 / 16, *(eighth / 8 for eighth in range(1, 9)))
_writing = threading.Lock()
_WARM = 3  # steps before the clock starts: compilation, buffers, connections
_SAMPLE = 0.2  # seconds between two samples of a process's own resource usage


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the global batch, and the matching learning rates."""

    table_size: int
    fields: int
    dim: int = 16
    hidden: tuple[int, ...] = (400, 400, 400)
    batch_size: int = 1
    first_sum: float = rates.FIRST_SUM

    @property
    def rate(self) -> float:
        """Adam's rate for this global batch, as in the recipe."""
        return rates.RATE * rates.scaled(self.batch_size, rates.SCALE_RATE)

    @property
    def table_rate(self) -> float:
        """Adagrad's rate for this global batch, as in the recipe."""
        return rates.TABLE_RATE / rates.scaled(self.batch_size, rates.SCALE_RATE) ** 0.5

    @property
    def accumulator(self) -> float:
        """Adagrad's initial sum for gradients that are means over a global batch."""
        return self.first_sum / self.batch_size**2

    def first_values(self, seed: int = 0) -> dict[str, Array]:
        """Return the initial values by name, equal on all ranks: table, bias, and the MLP's w0, b0, ..."""
        random = np.random.default_rng(seed)
        width = self.dim + 1
        table = random.standard_normal((self.table_size, width), np.float32) * np.float32(0.01)
        table[:, 0] = 0.0
        values = {"table": table, "bias": np.zeros(1, np.float32)}
        before = self.fields * self.dim
        for number, after in enumerate((*self.hidden, 1)):
            bound = (6 / (before + after)) ** 0.5  # Glorot initialization
            values[f"w{number}"] = random.uniform(-bound, bound, (before, after)).astype(np.float32)
            values[f"b{number}"] = np.zeros(after, np.float32)
            before = after
        return values


@dataclass
class Place:
    """This process's place in its job. ``hosts`` and ``ports`` hold each rank's host and a free port."""

    rank: int
    size: int
    hosts: list[str]
    ports: list[int]
    given: argparse.Namespace

    @property
    def cores(self) -> int:
        """Cores for this process: its share of the host's cores, at least one."""
        return max(1, len(os.sched_getaffinity(0)) // self.hosts.count(self.hosts[self.rank]))

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each rank."""
        return [f"{host}:{port}" for host, port in zip(self.hosts, self.ports, strict=True)]


class Strategy:
    """A way to train, called by the loop below. A single process needs only ``step`` and ``predict``.

    Args:
        place: Place of this process in its job.
        readers: Part of each global batch to read here: its number and the number of parts.
    """

    predict: Callable[[Array, Array], Array]
    """Returns probabilities, (n,), for ids and factors. Called only on rank 0."""

    def __init__(self, place: Place, readers: tuple[int, int] = (0, 1)) -> None:
        self.batches = batches(place, *readers)

    def step(self) -> int:
        """Train on the next global batch, or start to, and return its number of rows."""
        batch = next(self.batches)
        self.train(batch)
        return int(batch.count)

    def train(self, batch: Any) -> None:
        """Train on this rank's part of a batch."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all steps are complete."""

    def agree(self, number: int) -> int:
        """Return rank 0's number on all ranks."""
        return number

    def close(self) -> None:
        """Let the other processes exit."""


def batches(place: Place, rank: int, size: int) -> Iterator[Any]:
    """Yield a rank's parts of the global batches, epoch after epoch. Like the recipe, skip short ones.

    Adagrad gets sums over a batch in the recipe, but means in the other strategies. Hence one initial sum
    fits both only at one batch size.
    """
    from ringdance.data import Table, TableLoader

    table = Table.open(place.given.data, "train")
    loader = TableLoader(table, place.given.batch_size // size, rank=rank, size=size, drop_last=True)
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


class RecipeSteps(Strategy):
    """The steps of a recipe's model on each rank. The caller sets the layers to the values in ``first``."""

    def __init__(self, place: Place, make: Any) -> None:
        import ringdance.numpy as hvd

        super().__init__(place, (place.rank, place.size))
        sizes = place.given.sizes
        self.first, self._hvd, self.steps = sizes.first_values(), hvd, 0
        table = hvd.EmbeddingTable(
            sizes.table_size, 1 + sizes.dim, rate=sizes.table_rate, accumulator=sizes.first_sum
        )
        table.values[:] = self.first.pop("table")
        names = {"hidden": list(sizes.hidden), "seed": 0, "rate": sizes.rate}
        self.model = make(argparse.Namespace(**{**vars(sizes), **names}), table, sizes.fields)
        self.predict, self.table_rate = self.model.predict, sizes.table_rate

    def train(self, batch: Any) -> None:
        """Run a step of the recipe."""
        self.steps += 1
        warm = rates.warm(self.steps)
        self.model.table.rate = self.table_rate * warm
        self.model.step(batch, warm)

    def agree(self, number: int) -> int:
        """Return rank 0's number on all ranks."""
        return int(self._hvd.broadcast_object(number))


def tell(**what: Any) -> None:
    """Print a fact for compare.py."""
    with _writing:
        sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
        sys.stdout.flush()


def _memory() -> int:
    """Return the bytes of this process's private and shared memory, without pages of mapped files."""
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _look() -> None:
    """Report this process's processor time and memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    host = psutil.cpu_times()
    busy = host.user + host.nice + host.system
    tell(time=time.time(), cpu=used.ru_utime + used.ru_stime, memory=_memory(), host=busy)


def _watch() -> None:
    """Report both while this process lives. A process that serves others cannot tell when they train."""
    while True:
        _look()
        time.sleep(_SAMPLE)


class _Clock:
    """Measures the training time in seconds, and reports the wall-clock start and end of each stretch."""

    def __init__(self) -> None:
        self.before, self.began, self.wall = 0.0, 0.0, 0.0

    def start(self) -> None:
        _look()
        self.began, self.wall = time.perf_counter(), time.time()

    def stop(self) -> None:
        self.before = self.seconds
        self.began = 0.0
        tell(window=[self.wall, time.time()])
        _look()

    @property
    def seconds(self) -> float:
        return self.before + (time.perf_counter() - self.began if self.began else 0.0)


def steps_until_look(steps: int, seconds: float, limit: float) -> int:
    """Return the number of steps until the next look at the clock, 0 at the end.

    It is half of the steps for which there is still time, because ranks exchange a message at each look.

    Args:
        steps: Steps so far.
        seconds: Time that they took.
        limit: Time limit in seconds.
    """
    left = (limit / max(seconds, 1e-9) - 1) * steps
    return 0 if left < 0.5 else int(max(1, min(left / 2, steps)))


def train(strategy: Strategy, place: Place) -> None:
    """Train until the rows or the seconds are used up. Evaluate the validation part at the marks."""
    options, leader, clock, done = place.given, place.rank == 0, _Clock(), 0
    for _ in range(_WARM):
        done += strategy.step()
    strategy.finish()
    warm = done
    if leader:
        labels, ids, values = _validation(options)
        tell(warm=warm, validation=len(labels), ready=time.time())
    marks = [int(options.rows * share) for share in _MARKS]
    over, steps, look = False, 0, 1
    for mark in (mark for mark in marks if mark > warm):
        clock.start()
        while done < mark and not over:
            done += strategy.step()
            steps += 1
            if steps == look:
                strategy.finish()  # some steps may have started but not completed
                more = strategy.agree(steps_until_look(steps, clock.seconds, options.seconds))
                over, look = not more, steps + more
        strategy.finish()
        clock.stop()
        if leader:
            scores = np.concatenate([
                strategy.predict(ids[at : at + 8192], values[at : at + 8192])
                for at in range(0, len(ids), 8192)
            ])  # fmt: skip
            rounded = np.clip(scores.astype(np.float64), 1e-7, 1 - 1e-7)
            loss = -np.mean(np.where(labels > 0.5, np.log(rounded), np.log1p(-rounded)))
            tell(point=[done, clock.seconds, auc(scores, labels), float(loss)])
        if over:
            break
    strategy.close()


def _validation(given: argparse.Namespace) -> tuple[Array, Array, Array]:
    from ringdance.data import Table, TableLoader

    table = Table.open(given.data, "validation")
    rows = min(len(table), given.validation_rows)
    batch = next(iter(TableLoader(table, rows, shuffle=False)))
    return batch.labels, batch.ids, batch.values


def meet(given: argparse.Namespace) -> Place:
    """Return this process's place in the job. All ranks call it. The engine keeps running afterwards."""
    import ringdance.numpy as hvd

    hvd.init()
    with socket.socket() as free:
        free.bind(("", 0))
        facts = hvd.allgather_object((socket.gethostname(), free.getsockname()[1]))
    hosts = [host for host, _ in facts]
    if len(set(hosts)) == 1:  # a container's own name may not resolve
        hosts = ["localhost"] * len(hosts)
    return Place(hvd.rank(), hvd.size(), hosts, [port for _, port in facts], given)


def main(given: argparse.Namespace) -> None:
    """Run as one process of a strategy."""
    threading.Thread(target=_watch, daemon=True).start()
    sys.path.append(deepfm.__path__[0])  # its scripts import modules next to them
    module = importlib.import_module(f"strategies_{given.framework}")
    place = meet(given)
    module.STRATEGIES[given.child](place)
