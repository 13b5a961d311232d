"""A random program as plain data: `make(seed, size)` returns the same program on every rank.

A program is a list of steps, which all ranks run in the same order. In a step, each rank submits its
operations from several threads in its own order, and then waits for them in a different order. Whatever
differs between ranks (orders, delays) is drawn while the program runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from ringdance.core.request import Collective, ReduceOp

__all__ = ["AddSet", "Join", "Operations", "Options", "Planned", "Program", "RemoveSet", "Step", "make"]

REDUCIBLE = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "int64", "uint64", "bool",
)  # fmt: skip
FLOATS = ("float32", "float64")
C = Collective
COLLECTIVES = (C.ALLREDUCE, C.ALLGATHER, C.BROADCAST, C.ALLTOALL, C.REDUCESCATTER)


@dataclass(frozen=True)
class Planned:
    """One operation, known to all ranks.

    Attributes:
        number: Unique number in the program. Determines the values of the tensors.
        key: Name, or None for an unnamed operation (then `thread` is 0).
        where: Key of the process set. "" is the set of all ranks.
        shapes: Shapes of the tensors. For allgather and alltoall without the first dimension (see `rows`).
        rows: Rows of an allgather as [tensor][place], or splits of an alltoall as [tensor][from][to].
        spare: Rows of an alltoall that are not sent to any rank.
        contributors: Places of the set's members that submit it. The others have joined.
        fault: Reason why it fails on all ranks that submit it, or "". Names the difference in one member's
            call, or what is wrong in every member's call ("scalar", "joined").
        culprit: Global rank of the member whose call differs.
    """

    number: int
    key: str | None
    where: str
    kind: Collective
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    operation: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    rows: tuple[tuple[int, ...], ...] | tuple[tuple[tuple[int, ...], ...], ...] = ()
    spare: int = 0
    in_place: bool = False
    wake: bool = True
    thread: int = 0
    contributors: tuple[int, ...] | None = None
    fault: str = ""
    culprit: int = -1


@dataclass(frozen=True)
class Operations:
    """Operations that all members of each set submit. `flush` lists the sets to flush afterwards."""

    operations: tuple[Planned, ...]
    threads: int = 1
    flush: tuple[str, ...] = ()


@dataclass(frozen=True)
class AddSet:
    where: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RemoveSet:
    """Removes a set. Before that, only `submitter` submits `orphan`, which fails when the set is removed."""

    where: str
    orphan: Planned | None
    submitter: int


@dataclass(frozen=True)
class Join:
    """Each member of a set submits some of the operations, then joins. `counts` has their number by place."""

    where: str
    operations: tuple[Planned, ...]
    counts: tuple[int, ...]


Step = Operations | AddSet | RemoveSet | Join


@dataclass(frozen=True)
class Options:
    """Options for the engine and the loopback world. Most programs have one host with a window."""

    hosts: tuple[str, ...] | None
    window: bool
    delay: float
    threaded: bool
    chunk_bytes: int
    small_bytes: int
    cache_capacity: int
    fusion_threshold: int
    cycle_time: float
    spin_microseconds: int


@dataclass
class Program:
    seed: int
    size: int
    options: Options
    sets: dict[str, tuple[int, ...]]  # every set that ever exists: key -> global ranks
    steps: list[Step] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    naps: float = 0.0  # longest random delay, seconds

    @property
    def planted(self) -> Planned | None:
        """The operation that one member calls incorrectly, or None."""
        for step in self.steps:
            if isinstance(step, Operations):
                for planned in step.operations:
                    if planned.culprit >= 0:
                        return planned
        return None

    def __str__(self) -> str:
        return f"program of seed {self.seed} on {self.size} ranks ({', '.join(sorted(self.features))})"


def make(seed: int, size: int, *, mismatch: bool = False) -> Program:
    """Return the program for a seed. `mismatch` plants one incorrect call in it."""
    return _Maker(seed, size).program(mismatch)


FEATURES = (
    "overlapping sets", "dynamic set", "join", "barrier", "unnamed", "shuffled waits", "changing sizes",
    "many names", "threads", "delays", "groups", "lazy",
)  # fmt: skip


class _Maker:
    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(f"program {seed} {size}")
        self.size = size
        self.number = 0
        self.alive: dict[str, tuple[int, ...]] = {"": tuple(range(size))}
        chosen = self.random.sample(FEATURES, self.random.randint(3, 8))
        self.out = Program(seed, size, self._options(), dict(self.alive), features=set(chosen))
        if "delays" in chosen:
            self.out.naps = self.random.choice((0.0003, 0.002))

    def _options(self) -> Options:
        pick = self.random.choice
        hosts: list[tuple[str, ...] | None] = [None, None]
        if self.size > 2:
            hosts += [("a",) * (self.size - 1) + ("b",)]
        if self.size > 3:
            hosts += [("a",) * 2 + ("b",) * (self.size - 2), tuple("ab" * self.size)[: self.size]]
        if self.size == 2:
            hosts += [("a", "b")]
        return Options(
            hosts=pick(hosts),
            window=pick((True, True, False)),
            delay=pick((0.0, 0.1, 0.5)),
            threaded=self.random.random() < 0.85,
            chunk_bytes=pick((64, 256, 1024, 4096, 1 << 16)),
            small_bytes=pick((0, 64, 512, 4096)),
            cache_capacity=pick((1, 2, 8, 64, 1024)),
            fusion_threshold=pick((0, 256, 4096, 128 << 20)),
            cycle_time=pick((0.01, 0.2, 1.0)),
            spin_microseconds=pick((0, 50)),
        )

    # -- steps -----------------------------------------------------------------------------------

    def program(self, mismatch: bool) -> Program:
        out, features = self.out, self.out.features
        if "overlapping sets" in features:
            for _ in range(self.random.randint(1, 3)):
                self._add()
        total = self.random.randint(3, 6)
        middle = self.random.randrange(total)
        many = self.random.randrange(total) if "many names" in features else -1
        for position in range(total):
            if "dynamic set" in features and position == middle:
                self._add()
            if "join" in features and self.random.random() < 0.4:
                self._join()
            out.steps.append(self._operations(many=position == many))
            if "dynamic set" in features and position >= middle and self.random.random() < 0.5:
                self._remove()
        if "join" in features:
            self._join()
            out.steps.append(self._operations())
        if "dynamic set" in features:
            self._remove()
            out.steps.append(self._operations())
        if mismatch:
            self._plant()
        return out

    def _add(self) -> None:
        """Add a set of random ranks, unless it exists already. Any two sets may overlap."""
        ranks = tuple(sorted(self.random.sample(range(self.size), self.random.randint(1, self.size))))
        if ranks in self.alive.values():
            return
        where = f"set{len(self.out.sets)}"
        self.alive[where] = self.out.sets[where] = ranks
        self.out.steps.append(AddSet(where, ranks))

    def _remove(self) -> None:
        dynamic = [where for where in self.alive if where]
        if not dynamic:
            return
        where = self.random.choice(dynamic)
        ranks = self.alive.pop(where)
        orphan = None
        if len(ranks) > 1 and self.random.random() < 0.5:
            orphan = self._planned(f"orphan{self.number}", where, Collective.ALLREDUCE)
        self.out.steps.append(RemoveSet(where, orphan, self.random.choice(ranks)))

    def _join(self) -> None:
        where = self.random.choice([where for where, ranks in self.alive.items() if len(ranks) > 1])
        members = len(self.alive[where])
        counts = tuple(self.random.randint(0, 4) for _ in range(members))
        operations = []
        for i in range(max(counts)):
            kind = Collective.BARRIER if self.random.random() < 0.1 else Collective.ALLREDUCE
            key = None if "unnamed" in self.out.features and self.random.random() < 0.5 else f"t{i}"
            planned = self._planned(key, where, kind)
            who = tuple(place for place in range(members) if counts[place] > i)
            if len(who) < members and self.random.random() < 0.1:
                kind = self.random.choice((Collective.ALLGATHER, Collective.ALLREDUCE))
                planned = replace(self._planned(f"forbidden{i}", where, kind), fault="joined")
                if kind == Collective.ALLREDUCE:
                    planned = replace(planned, operation=ReduceOp.MIN, prescale=0.5)
            operations.append(replace(planned, contributors=who, wake=True))
        self.out.steps.append(Join(where, tuple(operations), counts))

    def _operations(self, many: bool = False) -> Operations:
        features, chance = self.out.features, self.random
        threads = chance.randint(2, 4) if "threads" in features else 1
        names = [f"t{i}" for i in range(chance.choice((4, 12, 24)))]
        made: list[Planned] = []
        lazy_set = chance.choice(list(self.alive))
        flush = chance.random() < 0.5
        for where in self.alive:
            for name in chance.sample(names, chance.randint(1, len(names) // 2)):
                made.append(self._planned(name, where, self._verb(), thread=chance.randrange(threads)))
            if "unnamed" in features:
                runs = chance.choice((1, 3, 20)) if chance.random() < 0.5 else 0
                alike = chance.random() < 0.5
                kind = self._verb()
                like = self._planned(None, where, kind)
                for _ in range(runs):
                    planned = self._planned(None, where, self._verb())
                    made.append(replace(like, number=planned.number) if alike else planned)
            if "barrier" in features and chance.random() < 0.7:
                made.append(self._planned(f"barrier{self.number}", where, Collective.BARRIER))
            if chance.random() < 0.03:
                made.append(self._scalar(where))
        if many:
            made += self._crowd(threads)
        if "lazy" in features:
            made = [replace(p, wake=p.where != lazy_set) for p in made]
        return Operations(tuple(made), threads, (lazy_set,) if flush else ())

    def _scalar(self, where: str) -> Planned:
        """Plan a reducescatter of a tensor without dimensions, which is wrong on every rank."""
        number = self._next()
        return Planned(
            number, f"scalar{number}", where, Collective.REDUCESCATTER, ("float32",), ((),), fault="scalar"
        )

    def _crowd(self, threads: int) -> list[Planned]:
        """Plan small named all-reduces: more than 1,024, or more than a small cache holds."""
        large = self.out.options.cache_capacity == 1024 and self.random.random() < 0.3
        count = 1100 if large else 80
        crowd = []
        for i in range(count):
            planned = Planned(self._next(), f"crowd{i}", "", Collective.ALLREDUCE, ("float32",), ((i % 5,),))
            crowd.append(replace(planned, thread=self.random.randrange(threads)))
        return crowd

    # -- operations ------------------------------------------------------------------------------

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _verb(self) -> Collective:
        return self.random.choice(COLLECTIVES) if self.random.random() < 0.5 else Collective.ALLREDUCE

    def _planned(self, key: str | None, where: str, kind: Collective, thread: int = 0) -> Planned:
        chance = self.random
        base = Planned(self._next(), key, where, kind, thread=thread)
        if kind == Collective.BARRIER:
            return base
        several = chance.randint(2, 4) if "groups" in self.out.features and chance.random() < 0.3 else 1
        # Without "changing sizes", a name always has the same signature, in every step.
        if "changing sizes" not in self.out.features:
            chance = random.Random(f"{self.out.seed} {key or self.number} {where} {kind}")
        dtypes = tuple(chance.choice(REDUCIBLE) for _ in range(several))
        shapes = tuple(self._shape(chance, kind) for _ in range(several))
        base = replace(base, dtypes=dtypes, shapes=shapes, in_place=chance.random() < 0.3)
        ranks = self.out.sets[where]
        if kind == Collective.ALLREDUCE:
            return self._reduced(base, chance, len(ranks))
        if kind == Collective.BROADCAST:
            return replace(base, root=chance.choice(ranks))
        if kind == Collective.ALLGATHER:
            rows = tuple(tuple(self.random.randint(0, 5) for _ in ranks) for _ in dtypes)
            return replace(base, rows=rows, in_place=False)
        if kind == Collective.ALLTOALL:
            table = tuple(
                tuple(tuple(self.random.randint(0, 4) for _ in ranks) for _ in ranks) for _ in dtypes
            )
            return replace(base, rows=table, spare=self.random.randint(0, 2), in_place=False)
        return replace(self._reduced(base, chance, 0), in_place=False)

    def _reduced(self, base: Planned, chance: random.Random, members: int) -> Planned:
        operation = chance.choice(
            (ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
        )
        if members and members & (members - 1) == 0 and chance.random() < 0.1:
            dtypes = tuple(chance.choice(FLOATS) for _ in base.dtypes)
            return replace(base, operation=ReduceOp.ADASUM, dtypes=dtypes)
        prescale, postscale = 1.0, 1.0
        if operation in (ReduceOp.SUM, ReduceOp.AVERAGE) and chance.random() < 0.3:
            prescale, postscale = chance.choice(((2.0, 1.0), (1.0, 0.5), (0.5, 3.0)))
        dtypes = base.dtypes
        if operation == ReduceOp.AVERAGE or (prescale, postscale) != (1.0, 1.0):
            dtypes = tuple("float32" if name == "bool" else name for name in dtypes)
        return replace(base, operation=operation, prescale=prescale, postscale=postscale, dtypes=dtypes)

    def _shape(self, chance: random.Random, kind: Collective) -> tuple[int, ...]:
        if kind in (Collective.ALLGATHER, Collective.ALLTOALL):
            return chance.choice(((), (1,), (3,), (2, 5), (0,), (17,)))
        if kind == Collective.REDUCESCATTER:
            return (chance.choice((0, 1, 2, 5, 9, 40)), *chance.choice(((), (3,), (2, 2))))
        return chance.choice(((), (0,), (1,), (7,), (3, 4), (64,), (100,), (333,), (40, 30), (2000,)))

    # -- a wrong call ----------------------------------------------------------------------------

    def _plant(self) -> None:
        """Make one member call one operation incorrectly."""
        places = [
            (s, i)
            for s, step in enumerate(self.out.steps)
            if isinstance(step, Operations)
            for i, planned in enumerate(step.operations)
            if len(self.out.sets[planned.where]) > 1 and not planned.fault
        ]
        chosen = self.random.choice(places)
        step = self.out.steps[chosen[0]]
        assert isinstance(step, Operations)
        operations = list(step.operations)
        planned = operations[chosen[1]]
        culprit = self.random.choice(self.out.sets[planned.where])
        fault = self.random.choice(self._faults(planned))
        operations[chosen[1]] = replace(planned, fault=fault, culprit=culprit)
        self.out.steps[chosen[0]] = replace(step, operations=tuple(operations))

    @staticmethod
    def _faults(planned: Planned) -> list[str]:
        if planned.kind == Collective.BARRIER:
            return ["kind"]
        faults = ["dtype", "kind", "group", "refusal"]
        if planned.kind in (Collective.ALLREDUCE, Collective.BROADCAST, Collective.REDUCESCATTER):
            faults.append("shape")
        if planned.kind in (Collective.ALLREDUCE, Collective.REDUCESCATTER):
            faults += ["operation", "prescale", "postscale"]
        if planned.kind == Collective.BROADCAST:
            faults.append("root")
        return faults
