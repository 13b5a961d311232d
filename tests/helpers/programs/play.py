"""One rank's part in a random program: submit, wait, and compare with the oracle."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from programs.oracle import brought, check, expected
from programs.plan import AddSet, Join, Operations, Planned, Program, RemoveSet, Step
from ringdance.core.engine import Engine
from ringdance.core.request import Collective, Description, ReduceOp, Request, Work
from ringdance.errors import ArgumentError, MismatchError, ProcessSetRemovedError

__all__ = ["Report", "play"]

_OFTEN = 0.2  # probability of delaying a rank before a call
_NAPS = 16  # approximate number of delays in a row of calls; even a thousand calls do not need more
REFUSED = "the caller gave something wrong"
# What a mismatch message must mention, by planted fault.
TITLES = {
    "dtype": "element types",
    "shape": "shapes",
    "operation": "reduce operations",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "root": "root ranks",
    "group": "numbers of tensors",
    "refusal": REFUSED,
    "scalar": "scalar",
    "joined": "have joined",
}


@dataclass
class Report:
    """One rank's findings. `wrong` must be empty. `said` must be equal on all ranks that have the key."""

    wrong: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)


@dataclass
class _Flight:
    planned: Planned
    place: int
    request: Request
    given: list[np.ndarray[Any, Any]] | None
    work: Work | None


def play(engine: Engine, program: Program) -> Report:
    """Run the whole program on this rank. Does not shut down the engine."""
    player = _Player(engine, program)
    for number, step in enumerate(program.steps):
        player.step(number, step)
    for where in [
        where for where in player.ids if where
    ]:  # remove remaining sets, so that the next program starts clean
        engine.remove_process_set(player.ids[where])
    engine.submit(Request(Description(Collective.BARRIER), name="end of program"), wake=False).wait()
    return player.report


def differing(planned: Planned, members: Sequence[int]) -> Planned:
    """Return what the culprit submits instead."""
    other = replace(planned, in_place=False)
    fault = planned.fault
    if fault == "dtype":
        return replace(
            other, dtypes=("float64" if planned.dtypes[0] == "float32" else "float32", *planned.dtypes[1:])
        )
    if fault == "shape":
        return replace(other, shapes=((3, 3, 3), *planned.shapes[1:]))
    if fault == "operation":
        return replace(
            other, operation=ReduceOp.MAX if planned.operation == ReduceOp.SUM else ReduceOp.SUM
        )
    if fault == "prescale":
        return replace(other, prescale=planned.prescale * 4)
    if fault == "postscale":
        return replace(other, postscale=planned.postscale * 4)
    if fault == "root":
        return replace(other, root=next(rank for rank in members if rank != planned.root))
    if fault == "group":
        rows: Any = planned.rows + planned.rows[:1]
        return replace(
            other,
            dtypes=planned.dtypes + planned.dtypes[:1],
            shapes=planned.shapes + planned.shapes[:1],
            rows=rows,
        )
    if fault == "kind" and planned.kind == Collective.BARRIER:
        return replace(other, kind=Collective.ALLREDUCE, dtypes=("float32",), shapes=((2,),))
    if fault == "kind" and planned.kind == Collective.ALLREDUCE:
        return replace(other, kind=Collective.BROADCAST, root=members[0])
    if fault == "kind":
        return replace(other, kind=Collective.ALLREDUCE, rows=(), root=-1)
    return other


class _Player:
    def __init__(self, engine: Engine, program: Program) -> None:
        self.engine = engine
        self.program = program
        self.report = Report()
        self.ids = {"": 0}
        self.random = random.Random(f"{program.seed} on {engine.rank}")

    def members(self, where: str) -> tuple[int, ...]:
        return self.program.sets[where]

    def step(self, number: int, step: Step) -> None:
        if isinstance(step, Operations):
            self._operations(step)
        elif isinstance(step, AddSet):
            self.ids[step.where] = self.engine.add_process_set(step.ranks)
            if self.engine.members(self.ids[step.where]) != step.ranks:
                self.report.wrong.append(f"members of {step.where}: {self.engine.process_sets()}")
        elif isinstance(step, RemoveSet):
            self._remove(step)
        elif self.engine.rank in self.members(step.where):
            self._join(number, step)

    # -- steps -----------------------------------------------------------------------------------

    def _operations(self, step: Operations) -> None:
        own = [p for p in step.operations if self.engine.rank in self.members(p.where)]
        jobs = [[p for p in own if p.thread == thread] for thread in range(step.threads)]
        dice = [random.Random(self.random.random()) for _ in jobs]
        errors: list[BaseException] = []

        def run(job: list[Planned], chance: random.Random) -> None:
            try:
                self._several(job, chance, step.flush)
            except BaseException as error:
                errors.append(error)

        name = threading.current_thread().name
        threads = [
            threading.Thread(target=run, args=(job, chance), name=f"{name} caller {i}", daemon=True)
            for i, (job, chance) in enumerate(zip(jobs, dice, strict=True))
            if i
        ]
        for thread in threads:
            thread.start()
        run(jobs[0], dice[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _several(self, job: list[Planned], chance: random.Random, flush: Sequence[str]) -> None:
        flights = []
        often = min(_OFTEN, _NAPS / max(1, len(job)))
        for planned in self._order(job, chance):
            self._nap(chance, often)
            flights.append(self._submit(planned, chance))
        for where in flush:
            if self.engine.rank in self.members(where):
                self.engine.flush(self.ids[where])
        if "shuffled waits" in self.program.features:
            chance.shuffle(flights)
        for flight in flights:
            self._nap(chance, often)
            self._wait(flight, chance)

    def _order(self, job: list[Planned], chance: random.Random) -> list[Planned]:
        """Shuffle the named operations. Unnamed operations keep their relative order."""
        if "shuffled waits" not in self.program.features:
            return job
        places = list(range(len(job)))
        chance.shuffle(places)
        shuffled = [job[i] for i in places]
        unnamed = iter([p for p in job if p.key is None])
        return [next(unnamed) if p.key is None else p for p in shuffled]

    def _nap(self, chance: random.Random, often: float = _OFTEN) -> None:
        if self.program.naps and chance.random() < often:
            time.sleep(chance.random() * self.program.naps)

    def _remove(self, step: RemoveSet) -> None:
        engine, set_id = self.engine, self.ids.pop(step.where)
        flight = None
        if step.orphan is not None and engine.rank == step.submitter:
            flight = self._submit(step.orphan, self.random, set_id)
        engine.remove_process_set(set_id)
        if flight is not None and flight.work is not None:
            try:
                flight.work.wait()
                self.report.wrong.append(f"{step.orphan}: done on one member only")
            except ProcessSetRemovedError:
                pass
        try:
            engine.submit(Request(Description(Collective.BARRIER), name="late", set_id=set_id))
            self.report.wrong.append(f"removed set {step.where} takes requests")
        except ArgumentError:
            pass

    def _join(self, number: int, step: Join) -> None:
        members = self.members(step.where)
        place = members.index(self.engine.rank)
        own = list(step.operations[: step.counts[place]])
        flights = []
        for planned in self._order(own, self.random):
            self._nap(self.random)
            flights.append(self._submit(planned, self.random))
        if self.random.random() < 0.5:
            for flight in flights:
                self._wait(flight, self.random)
        request = Request(Description(Collective.JOIN), name="join", set_id=self.ids[step.where])
        last = self.engine.submit(request, wake=self.random.random() < 0.5).wait()
        for flight in flights:
            self._wait(flight, self.random)
        right = [rank for rank, count in zip(members, step.counts, strict=True) if count == max(step.counts)]
        if last not in right:
            self.report.wrong.append(f"join of step {number}: last is {last}, not one of {right}")
        self.report.said[f"join of step {number}"] = str(last)

    # -- operations ------------------------------------------------------------------------------

    def _submit(self, planned: Planned, chance: random.Random, set_id: int | None = None) -> _Flight:
        members = self.members(planned.where)
        place = members.index(self.engine.rank)
        called = planned
        if planned.culprit == self.engine.rank:
            called = differing(planned, members)
        inputs = brought(called, place)
        free_first = called.kind in (Collective.ALLGATHER, Collective.ALLTOALL)
        description = Description(
            called.kind,
            called.dtypes,
            tuple(view.shape[1:] if free_first else view.shape for view in inputs),
            called.operation,
            called.prescale,
            called.postscale,
            called.root,
            (-1,) if called.fault == "scalar" else (),
        )
        splits = None
        if called.kind == Collective.ALLTOALL:
            splits = tuple(np.array(table[place], np.int64) for table in called.rows)
        buffers = None
        if called.kind in (Collective.ALLREDUCE, Collective.BROADCAST):
            if called.in_place:
                buffers = inputs
            elif chance.random() < 0.3:
                buffers = [np.empty_like(view) for view in inputs]
        outputs = None if buffers is None else tuple(buffers)
        where = self.ids[planned.where] if set_id is None else set_id
        request = Request(description, tuple(inputs), outputs, planned.key, where, splits)
        if planned.fault == "refusal" and planned.culprit == self.engine.rank:
            self.engine.refuse(request, REFUSED)
            return _Flight(planned, place, request, buffers, None)
        work = self.engine.submit(request, wake=planned.wake)
        return _Flight(planned, place, request, buffers, work)

    def _wait(self, flight: _Flight, chance: random.Random) -> None:
        work, planned = flight.work, flight.planned
        if work is None:
            return
        try:
            if chance.random() < 0.1:
                try:
                    work.wait(timeout=chance.random() * 0.001)
                except TimeoutError:
                    pass
            result = work.wait()
        except MismatchError as error:
            self._failed(planned, str(error))
            return
        if planned.fault:
            self.report.wrong.append(f"{planned}: raised nothing")
            return
        self._compare(flight, work, result)

    def _failed(self, planned: Planned, text: str) -> None:
        if TITLES.get(planned.fault, planned.key or "") not in text or not planned.fault:
            self.report.wrong.append(f"{planned}: raised: {text}")
        self.report.said[f"error of {planned.number}"] = text

    def _compare(self, flight: _Flight, work: Work, result: Any) -> None:
        planned = flight.planned
        members = self.members(planned.where)
        root = members.index(planned.root) if planned.kind == Collective.BROADCAST else -1
        right, received = expected(planned, flight.place, len(members), root)
        problem = check(result, right)
        if not problem and planned.kind == Collective.ALLTOALL:
            got = [splits.tolist() for splits in work.received_splits or ()]
            problem = "" if got == received else f"received splits {got}, not {received}"
        if (
            not problem
            and flight.given is not None
            and any(a is not b for a, b in zip(result, flight.given, strict=True))
        ):
            problem = "the result is not in the given outputs"
        if not problem and flight.given is not flight.request.inputs and not planned.in_place:
            again = brought(planned, flight.place)
            if any(not np.array_equal(a, b) for a, b in zip(flight.request.inputs, again, strict=True)):
                problem = "an input was changed"
        if problem:
            self.report.wrong.append(f"{planned}: {problem}")
