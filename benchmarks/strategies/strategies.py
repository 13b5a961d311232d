"""What the strategies of compare.py share: the model's sizes and first values, the clock, the curve.

compare.py starts it, as each process of each strategy, by `ringdance run`. What a process finds is printed as
lines of JSON after a mark, so that it arrives from every host without a common file system.
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
# When to evaluate, as shares of a run's rows: the same for all strategies. The first ones are for those that
# reach no other one in their time.
_MARKS = (1 / 64, 1 / 16, *(eighth / 8 for eighth in range(1, 9)))
_writing = threading.Lock()
_WARM = 3  # steps before the clock starts: compilation, buffers, connections
_SAMPLE = 0.2  # seconds between two looks at a process's own use of the machine


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the global batch, and the rates that go with them."""

    table_size: int
    fields: int
    dim: int = 16
    hidden: tuple[int, ...] = (400, 400, 400)
    batch_size: int = 1
    first_sum: float = rates.FIRST_SUM

    @property
    def rate(self) -> float:
        """Return Adam's rate for this global batch, as the recipe's."""
        return rates.RATE * rates.scaled(self.batch_size, rates.SCALE_RATE)

    @property
    def table_rate(self) -> float:
        """Return Adagrad's rate for this global batch, as the recipe's."""
        return rates.TABLE_RATE / rates.scaled(self.batch_size, rates.SCALE_RATE) ** 0.5

    @property
    def accumulator(self) -> float:
        """Return Adagrad's first sum for gradients that are means over a global batch."""
        return self.first_sum / self.batch_size**2

    def first_values(self, seed: int = 0) -> dict[str, Array]:
        """Return the first values by name, equal everywhere: table, bias; w0, b0, ... of the MLP."""
        random = np.random.default_rng(seed)
        width = self.dim + 1
        table = random.standard_normal((self.table_size, width), np.float32) * np.float32(0.01)
        table[:, 0] = 0.0
        values = {"table": table, "bias": np.zeros(1, np.float32)}
        before = self.fields * self.dim
        for number, after in enumerate((*self.hidden, 1)):
            bound = (6 / (before + after)) ** 0.5  # Glorot's
            values[f"w{number}"] = random.uniform(-bound, bound, (before, after)).astype(np.float32)
            values[f"b{number}"] = np.zeros(after, np.float32)
            before = after
        return values


@dataclass
class Place:
    """Where this process is in its job; ``hosts`` and ``ports`` (one free on each) are of all ranks."""

    rank: int
    size: int
    hosts: list[str]
    ports: list[int]
    given: argparse.Namespace

    @property
    def cores(self) -> int:
        """Cores for this process: its share of those of its host, at least one."""
        return max(1, len(os.sched_getaffinity(0)) // self.hosts.count(self.hosts[self.rank]))

    @property
    def addresses(self) -> list[str]:
        """HOST:PORT of each rank."""
        return [f"{host}:{port}" for host, port in zip(self.hosts, self.ports, strict=True)]


class Strategy:
    """A way to train, as the loop below calls it; a process alone needs only ``step`` and ``predict``.

    Args:
        place: of this process.
        readers: the part of each global batch that is read here: which of how many.
    """

    predict: Callable[[Array, Array], Array]
    """Return probabilities, (n,), of ids and factors; called on rank 0 alone."""

    def __init__(self, place: Place, readers: tuple[int, int] = (0, 1)) -> None:
        self.batches = batches(place, *readers)

    def step(self) -> int:
        """Train on the next global batch, or start to; return its rows."""
        batch = next(self.batches)
        self.train(batch)
        return int(batch.count)

    def train(self, batch: Any) -> None:
        """Train on this rank's part of a batch."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all steps have been made."""

    def agree(self, number: int) -> int:
        """Return rank 0's number on all ranks."""
        return number

    def close(self) -> None:
        """Let the other processes end."""


def batches(place: Place, rank: int, size: int) -> Iterator[Any]:
    """Yield a rank's parts of the global batches of one epoch after another; whole ones, as in the recipe.

    Adagrad gets sums over a batch in the recipe and means elsewhere: one first sum fits both at one size.
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
    """The steps of a recipe's model, on each rank; ``first``: values that the caller gives to its layers."""

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
        """Make the recipe's step."""
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
    """Return bytes that are this process's own or shared memory; pages of mapped files belong to no one."""
    try:
        with open("/proc/self/status") as status:
            found = dict(line.split(":", 1) for line in status)
        return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _look() -> None:
    """Report this process's processor time and memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    host = psutil.cpu_times()
    busy = host.user + host.nice + host.system
    tell(time=time.time(), cpu=used.ru_utime + used.ru_stime, memory=_memory(), host=busy)


def _watch() -> None:
    """Report both as long as this process lives: one that serves others does not know when they train."""
    while True:
        _look()
        time.sleep(_SAMPLE)


class _Clock:
    """The time of training, in seconds; each stretch of it is reported with its ends as wall-clock time."""

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
    """Return after how many steps to look at the clock again, after so many; 0 at the end.

    Half of the steps for which there is time, as the ranks exchange a message at each look.
    """
    left = (limit / max(seconds, 1e-9) - 1) * steps
    return 0 if left < 0.5 else int(max(1, min(left / 2, steps)))


def train(strategy: Strategy, place: Place) -> None:
    """Train until the rows or the seconds are used up; score the validation part at the marks."""
    given, leader, clock, done = place.given, place.rank == 0, _Clock(), 0
    for _ in range(_WARM):
        done += strategy.step()
    strategy.finish()
    warm = done
    if leader:
        labels, ids, values = _validation(given)
        tell(warm=warm, validation=len(labels), ready=time.time())
    marks = [int(given.rows * share) for share in _MARKS]
    over, steps, look = False, 0, 1
    for mark in (mark for mark in marks if mark > warm):
        clock.start()
        while done < mark and not over:
            done += strategy.step()
            steps += 1
            if steps == look:
                strategy.finish()  # steps may only have been started
                more = strategy.agree(steps_until_look(steps, clock.seconds, given.seconds))
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
    """Return this process's place; all ranks call it. The engine is still there afterwards."""
    import ringdance.numpy as hvd

    hvd.init()
    with socket.socket() as free:
        free.bind(("", 0))
        facts = hvd.allgather_object((socket.gethostname(), free.getsockname()[1]))
    hosts = [host for host, _ in facts]
    if len(set(hosts)) == 1:  # a name of its own may not resolve in a container
        hosts = ["localhost"] * len(hosts)
    return Place(hvd.rank(), hvd.size(), hosts, [port for _, port in facts], given)


def main(given: argparse.Namespace) -> None:
    """Be one process of a strategy."""
    threading.Thread(target=_watch, daemon=True).start()
    sys.path.append(deepfm.__path__[0])  # its scripts import what lies beside them
    module = importlib.import_module(f"strategies_{given.framework}")
    place = meet(given)
    module.STRATEGIES[given.child](place)
