"""Tune a job while it trains: try different values in its first steps, then use the best ones.

At the end of a step, each rank submits its measurements as a request that no thread waits for (``TUNE``).
The request is executed along with the next exchange of gradients, at the same point in the order on all
ranks. There, all ranks advance the same ``Search`` with the same bytes, and change their engines. See Note
[Tuning] in ``core.process_sets.registry``. Values outside the engine (``tunables``) change at the end of the
following step.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import sys
from collections.abc import Generator, Mapping
from statistics import fmean
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from ringdance.core import labels
from ringdance.core.engine import Engine
from ringdance.core.process_sets.agreement import CacheEntry
from ringdance.core.process_sets.batch import description_bytes
from ringdance.core.process_sets.registry import TUNED_CHUNK_BYTES
from ringdance.core.process_sets.state import EngineValues, ProcessSetState
from ringdance.core.request import TUNE_NAME, Collective, Description, ReduceOp, Request, Work
from ringdance.core.ring import Word
from ringdance.errors import RingdanceError
from ringdance.host.files import open_at_once
from ringdance.host.limits import usable_cores
from ringdance.training.tuning import tuned
from ringdance.training.tuning.dimensions import dimensions_of, tunables
from ringdance.training.tuning.search import Dimension, Measured, Outcome, Search, Trial

_log = logging.getLogger("ringdance")

Values = dict[str, float]
_LIMIT = 150  # maximum number of steps for warm-up and search, before the comparison with the start values
_FEWEST = 6  # steps before anything changes, so that the ranks see all of a step's requests
_COLUMNS = (
    "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled", "cycle_time_ms",
    "tensor_fusion_threshold", "score", "step", "chunk_bytes", "wire_bytes", "overlap", "intra_op_threads",
    "step_ms", "outcome",
)  # fmt: skip
_HALF = ("float16", "bfloat16")  # dtypes in which a sum may overflow in one order of addition only

_kept: list[dict[str, Any]] = []  # results found in this process, which a restarted job reuses


def tuner_of(engine: Engine) -> Autotuner | None:
    """Create and start the tuner of this rank's engine. Returns None if nothing can be tuned in this job."""
    if engine.size == 1 or engine.settings.deterministic:
        if not engine.rank:
            where = "in a job of one rank" if engine.size == 1 else "in deterministic mode"
            _log.warning("ringdance: autotune is off %s. The settings stay as they are.", where)
        return None
    tuner = Autotuner(engine)
    engine.on_step = tuner.on_step
    return tuner


class Autotuner:
    """The tuner of one rank. Every rank has one, and all submit the same number of requests.

    Args:
        engine: This rank's engine.

    Attributes:
        values: Values that the ranks last agreed on. A missing value is the one in the job's settings.
        done: True once there will be no further changes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings
        state = engine.sets.registered[0].state
        assert state is not None
        self._state: ProcessSetState = state
        self.values: Values = {}
        self.done = False
        self._job: dict[str, Any] = {}
        self._file: Values = {}  # values from the --tuned file
        self._own: dict[str, int] = {}  # this rank's original values of tunables
        self._given: dict[str, int] = {}  # values that the tuner last set, or original ones
        self._written = False  # True if the agreed values are a result to reuse
        self._search: Search | None = None
        self._bytes: tuple[int, ...] = (0,)
        self._run: Generator[Trial, Measured, Outcome] | None = None
        settings = self.settings
        warm_up = max(_FEWEST, settings.autotune_warmup_samples * settings.autotune_steps_per_sample)
        self._warm_up = warm_up + 2  # the start of the first step is unknown, and agreement takes one step
        self._trial = self._seen = Trial((), 0, warm_up)
        self._skip, self._said = 0, ""
        self._work: Work | None = None  # if it completes without a new trial, join() has withdrawn it
        self._done: list[tuple[int, int, int]] = []  # per measured step: duration and waiting in ns, bytes
        self._steps, self._last, self._began = 0, (0, 0, 0), monotonic()
        self._original = state.values()
        engine.sets.on_tune = self._on_tune

    # -- on the thread that ends a step --------------------------------------------------------

    def on_step(self) -> None:
        """Record the end of a step, and submit the measurements once the trial has enough steps."""
        words = self.engine.recorder.words
        if words[Word.STEPS] == self._steps:  # this mark did not count as a step
            return
        first, self._steps = not self._steps, words[Word.STEPS]
        last, self._last = self._last, (monotonic_ns(), words[Word.WAITED], words[Word.BYTES])
        again = self._work is not None and self._work.complete  # read before ``_trial``
        trial = self._trial  # read once: another thread may execute the request
        if trial is not self._seen or self.done:  # this step's exchange already used the new values
            self._seen, self._skip, self._done, self._work = trial, trial.skip, [], None
            self._give({name: int(self.values.get(name, own)) for name, own in self._own.items()})
        if self.done:
            self._finish()
        elif self._skip > 0:
            self._skip -= 1
        elif first:
            self._began = monotonic()
        elif len(self._done) < trial.steps:
            now = self._last
            self._done.append((now[0] - last[0], now[1] - last[1], now[2] - last[2]))
        if len(self._done) >= trial.steps and not self.done and (again or self._work is None):
            self._submit(self._measured() if self._run else self._hello())

    def restore(self) -> None:
        """Restore the original values of the tunables when this rank leaves the job."""
        self._give(self._own)

    def _give(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            if value != self._given[name]:
                tunables[name].set(value)
                self._given[name] = value

    def _submit(self, what: dict[str, Any]) -> None:
        payload = np.frombuffer(json.dumps(what).encode(), np.uint8)
        request = Request(Description(Collective.TUNE), (payload,), name=TUNE_NAME)
        with contextlib.suppress(RingdanceError):  # the end or failure of the job is reported elsewhere
            self._work = self.engine.submit(request, wake=False)

    def _measured(self) -> dict[str, Any]:
        times, waited, self._bytes = zip(*self._done, strict=True)
        return {"times": times, "waited": sum(waited) / max(1, sum(times))}

    def _hello(self) -> dict[str, Any]:
        """Return this rank's known results, and everything that determines what can be tuned.

        Rank 0 makes all decisions that depend on settings, because ``init()`` does not compare all settings
        between ranks.
        """
        now = {name: tunable.get() for name, tunable in tunables.items()}
        self._own = {name: value for name, value in now.items() if value is not None}
        self._given = dict(self._own)
        answer: dict[str, Any] = {
            "cores": usable_cores(self.engine.local_pids), "known": _kept,
            "eager": self._state.pending.eager_last > self._began,
            "tunables": {name: [now[name], tunable.most()] for name, tunable in tunables.items()},
        }  # fmt: skip
        if self.engine.rank == 0:
            # As in Horovod, a setting is not tuned if the user has set its HOROVOD_ variable.
            fixed = [n for n in ("fusion_threshold", "cycle_time") if "HOROVOD_" in self.settings.origin(n)]
            dtypes = {d for entry in self._entries() for d in entry.description.dtypes}
            if not dtypes.isdisjoint(_HALF):
                fixed.append("hierarchical")
            answer |= {
                "fixed": fixed, "steps": self.settings.autotune_steps_per_sample, "warm_up": self._warm_up,
                "values": self._original._asdict(), "model": tuned.model_of(self._gradients()),
            }  # fmt: skip
            if self.settings.tuned:
                try:
                    answer["file"] = tuned.read(self.settings.tuned)
                except ValueError as error:
                    answer["refused"] = str(error)
        return answer

    def _entries(self) -> list[CacheEntry]:
        entries = [entry for entry in list(self._state.pending.cache.entries) if entry is not None]
        return [entry for entry in entries if entry.description.kind is Collective.ALLREDUCE]

    def _gradients(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Return the tensors averaged or summed so far, or only the known gradients if there are any."""
        tensors: dict[bool, dict[str, tuple[tuple[int, ...], str, int]]] = {True: {}, False: {}}
        for entry in self._entries():
            d = entry.description
            if d.operation not in (ReduceOp.AVERAGE, ReduceOp.SUM) or d.detail:
                continue
            names = labels.tensors_of(entry.name)
            known = bool(names) and labels.label_of(entry.name).startswith("gradients of ")
            chosen = names if known else [f"{entry.name}.{i}" for i in range(len(d.shapes))]
            for name, shape, dtype in zip(chosen, d.shapes, d.dtypes, strict=False):
                nbytes = description_bytes(Description(d.kind, (dtype,), (shape,)))
                tensors[known][name] = (shape, dtype, nbytes)
        return tensors[True] or tensors[False]

    # -- in a step of the engine, the same on all ranks ----------------------------------------

    def _on_tune(self, payloads: list[bytes]) -> EngineValues | None:
        if self.done:
            return None
        if not all(payloads):
            if self._search is not None:
                self._take(self._search.start)
            self._stop("a rank has called join(), which ends the search. The settings stay as they are.")
        else:
            answers = [json.loads(payload) for payload in payloads]
            if self._run is None:
                self._begin(answers)
            else:
                steps = zip(*(what["times"] for what in answers), strict=True)
                times = [fmean(step) * 1e-9 for step in steps]
                self._advance(Measured(times, min(what["waited"] for what in answers)))
        job, values = self._original._asdict(), dict(self.values)
        if "hierarchical" in values:
            values["flat"] = not values["hierarchical"]
        return EngineValues(**{name: type(own)(values.get(name, own)) for name, own in job.items()})

    def _begin(self, answers: list[dict[str, Any]]) -> None:
        """Use a known result, or start the search."""
        hardware = tuned.hardware_of(self.engine.hosts, [what["cores"] for what in answers])
        self._job = hardware | answers[0]["model"]
        for what in answers:
            for known in what["known"]:
                if not tuned.differences(known["job"], self._job):
                    self.values = dict(known["values"])
                    self._stop(f"the result from before the restart is used: {_text(self.values)}")
                    return
        refused, file = answers[0].get("refused", ""), answers[0].get("file")
        if file is not None:
            refused = tuned.differences(file["job"], self._job)
            refused = refused and f"{self.settings.tuned} belongs to a different job: {refused}"
        if refused and not self.engine.rank:
            _log.warning(
                "ringdance: cannot use the file for --tuned, so the settings stay as they are: %s.", refused
            )
        if file is not None and not refused:
            self.values, self._file = dict(file["values"]), dict(file["values"])
        if not self.settings.autotune:
            used = file is not None and not refused
            self._stop(f"{_text(self.values)} (from {self.settings.tuned})" if used else "")
            return
        dimensions, self._warm_up = self._dimensions(answers), answers[0]["warm_up"]
        self._search = Search(dimensions, answers[0]["steps"], _LIMIT - self._warm_up)
        if not dimensions:
            self._stop("nothing can be tuned in this job. The settings stay as they are.")
            self._written = True
            return
        self._run = self._search.run()
        self._next(next(self._run))

    def _advance(self, measured: Measured) -> None:
        assert self._run is not None
        try:
            self._next(self._run.send(measured))
        except StopIteration as end:
            self._end(end.value)

    def _next(self, trial: Trial) -> None:
        self._take(trial.point)
        self._trial = trial

    def _take(self, point: tuple[int, ...]) -> None:
        assert self._search is not None
        for dimension, index in zip(self._search.dimensions, point, strict=True):
            if index != dimension.start:
                self.values[dimension.name] = dimension.values[index]
            elif dimension.name in self._file:
                self.values[dimension.name] = self._file[dimension.name]
            else:  # use each rank's own value
                self.values.pop(dimension.name, None)

    def _end(self, outcome: Outcome) -> None:
        search = self._search
        assert search is not None
        self._take(outcome.point)
        changed = {
            dim.name: dim.values[index]
            for dim, index in zip(search.dimensions, outcome.point, strict=True) if index != dim.start
        }
        after = f"after {self._warm_up + search.used} steps"
        if outcome.point == search.start:
            self._stop(f"no improvement found {after}. The settings stay as they are.")
        else:
            won = f"saves {100 * outcome.gain:.1f} ± {100 * outcome.error:.1f}% of a step's time"
            self._stop(f"{_text(changed)}: {won}, found {after}")
        _kept.append({"job": self._job, "values": self.values})
        self._written = True

    def _stop(self, said: str) -> None:
        self._said, self.done = said, True

    def _dimensions(self, answers: list[dict[str, Any]]) -> list[Dimension]:
        exchange, rank = self._state.exchange, self.engine.rank
        most = exchange.most_chunk_bytes
        if 0 < most < TUNED_CHUNK_BYTES and not rank:
            _log.warning(
                "ringdance: autotune tries chunks of at most %d KiB, because /dev/shm on a host lacks space "
                "for larger ones. Enlarge it (in containers: --shm-size).", most >> 10,
            )  # fmt: skip
        rooms = {"chunk_bytes": min(most, TUNED_CHUNK_BYTES), "wire_bytes": TUNED_CHUNK_BYTES}
        small, hosts = self.settings.small_bytes, exchange.flat is not None
        return dimensions_of(answers, self._file, self._state.executor.largest, rooms, small, hosts)

    # -- the end -------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Write and print the outcome. After this, the engine no longer calls the tuner."""
        self.engine.on_step = None
        if self.engine.rank:
            return
        if self._said:
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(f"ringdance autotune: {self._said}", file=sys.stderr, flush=True)
        if self.settings.autotune_log:
            try:
                self._write(self.settings.autotune_log)
            except OSError as error:
                path, why = self.settings.autotune_log, error.strerror or error
                _log.warning("ringdance: the autotune log %s cannot be written: %s", path, why)

    def leave(self) -> None:
        """Write the results of an unfinished search. Called when the job ends."""
        if self.engine.on_step is None:
            return
        if not self.done and self.settings.autotune:
            self._said = "the job ended before the search did (it takes up to 280 steps). Nothing was tuned."
        self._finish()

    def _write(self, path: str) -> None:
        search, settings = self._search, self.settings
        if search is None:
            return
        base, number, last = {**self._state.values()._asdict(), **self.values}, self._warm_up, search.start
        nbytes, exchange = fmean(self._bytes), self._state.exchange
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", newline="", opener=open_at_once) as file:
            rows = csv.writer(file)
            rows.writerow(_COLUMNS)
            history = [*search.history, (search.best if self._written else last, [], "final")]
            for point, times, what in history:
                seconds = fmean(times) if times else 0.0
                values = base | {d.name: d.values[i] for d, i in zip(search.dimensions, point, strict=True)}
                staged = exchange.flat is not None and values.get("hierarchical", not values["flat"])
                number += len(times) + search.skipped(last, point) * bool(times)
                last = point
                rows.writerow([
                    int(staged), 0, 0, int(settings.cache_capacity > 0),
                    f"{values['cycle_time']:g}", f"{values['fusion_threshold'] / (1 << 20):g}",
                    f"{nbytes / seconds / 1e6:.3f}" if seconds else "", number,
                    int(values["chunk_bytes"]), int(values["wire_bytes"]), values.get("overlap", ""),
                    values.get("threads", ""), f"{seconds * 1e3:.3f}" if seconds else "", what,
                ])  # fmt: skip
        if not self._written:  # the result was not compared with the start values
            return
        root, ending = os.path.splitext(path)
        tuned.write(f"{path if ending == '.json' else root}.json", self._job, self.values, self._said)


def _text(values: Mapping[str, float]) -> str:
    """Return values in readable form, such as ``chunk_bytes=384K``."""
    return ", ".join(f"{name}={_number(name, value)}" for name, value in values.items()) or "no change"


def _number(name: str, value: float) -> str:
    if name.endswith(("threshold", "bytes")):
        for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
            if value and value % unit == 0:
                return f"{int(value) // unit}{letter}"
    return f"{value:g}"
