"""Run random programs on a loopback world, and report the full state of a program that hangs.

`python -m programs.worlds FIRST COUNT [--mismatch]` (in the directory `tests`) tries many seeds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from loopback import LoopbackTransport, LoopbackWorld

from programs.plan import Program, make
from programs.play import Report, play
from ringdance.core.engine import Engine
from ringdance.core.process_sets.registry import buffer_bytes, vector_bytes
from ringdance.settings import Settings

__all__ = ["on_loopback", "problems", "settings_of", "size_of", "try_seeds"]

LIMIT = 60.0  # seconds for one program; generous, because a busy machine is slow
FRESH = 2_000  # number of programs after which the processes are replaced


def size_of(seed: int) -> int:
    """Return the number of ranks on which a seed runs."""
    return (2, 3, 5, 8)[seed % 4]


def settings_of(program: Program) -> Settings:
    o = program.options
    return Settings(
        fusion_threshold=o.fusion_threshold,
        cycle_time=o.cycle_time,
        cache_capacity=o.cache_capacity,
        chunk_bytes=o.chunk_bytes,
        small_bytes=o.small_bytes,
        window=o.window,
        spin_microseconds=o.spin_microseconds,
        flight_recorder_dir=tempfile.gettempdir(),
    )


def problems(program: Program, reports: list[Report]) -> list[str]:
    """Return the problems of a completed program: wrong results, and reports that differ between ranks."""
    problems = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report.wrong]
    for key in sorted({key for report in reports for key in report.said}):
        texts = {report.said[key] for report in reports if key in report.said}
        if len(texts) > 1:
            problems.append(f"{key}: ranks got different reports: {sorted(texts)}")
    planted = program.planted
    if planted is not None:
        told = sum(f"error of {planted.number}" in report.said for report in reports)
        right = len(program.sets[planted.where]) - (planted.fault == "refusal")
        if told != right:
            problems.append(f"{planted}: {told} ranks reported it, not {right}")
    return problems


def on_loopback(program: Program, limit: float = LIMIT) -> list[str]:
    """Run a program on threads and return its problems."""
    o = program.options
    settings = settings_of(program)
    world = LoopbackWorld(
        program.size,
        hosts=o.hosts,
        window=o.window,
        buffer_bytes=max(buffer_bytes(settings), 1),
        vector_bytes=vector_bytes(program.size, o.cache_capacity),
        seed=program.seed,
        delay=o.delay,
    )
    engines: dict[int, Engine] = {}

    def rank(transport: LoopbackTransport) -> Report:
        engine = Engine(transport, settings, threaded=o.threaded)
        engines[transport.rank] = engine
        report = play(engine, program)
        if not engine.shutdown():
            report.wrong.append("shutdown was not agreed")
        if engine.context.in_transit:  # it would poll instead of sleeping
            report.wrong.append(f"{engine.context.in_transit} exchanges are in transit at the end")
        return report

    before = {thread.ident for thread in threading.enumerate()}
    try:
        return problems(program, world.run(rank, limit))
    except TimeoutError as error:
        return [_hung(str(error), engines, before)]
    except Exception:
        return [traceback.format_exc()]


def _hung(why: str, engines: dict[int, Engine], before: set[int | None]) -> str:
    parts = [why]
    for rank, engine in sorted(engines.items()):
        for state in engine.sets.states():
            names = ", ".join(work.name for work in state.pending.in_flight())
            parts.append(
                f"rank {rank}, set {state.set_id} of {state.members}: round {state.rounds}, in round "
                f"{state.in_round}, waiting {len(engine.callers.waiting)}, joined {state.pending.joined:b}; "
                f"pending: {names}"
            )
    for thread in threading.enumerate():
        frame = sys._current_frames().get(thread.ident or 0)
        if thread.ident not in before and frame is not None:
            parts.append(f"{thread.name}:\n" + "".join(traceback.format_stack(frame)[-6:]))
    for engine in engines.values():
        engine.end.closed = True  # stops its threads; the program has failed anyway
    return "\n".join(parts)


def try_seed(seed: int, mismatch: bool) -> str:
    """Return the problems of one seed ("" if there are none)."""
    program = make(seed, size_of(seed), mismatch=mismatch)
    issues = on_loopback(program)
    return (
        "" if not issues else "\n  ".join([f"{program}, mismatch={mismatch}, {program.options}", *issues[:6]])
    )


def try_seeds(
    seeds: Sequence[int], mismatch: bool = False, processes: int = 1, stop_after: int = 3
) -> list[str]:
    """Run many programs and return the failures' problems. Stops early after ``stop_after`` failures."""
    shown = ", ".join(map(str, seeds)) if len(seeds) < 100 else f"{seeds[0]} to {seeds[-1]}"
    print(f"random programs on loopback: seeds {shown}, mismatch={mismatch}", flush=True)
    failures: list[str] = []
    if processes == 1:
        for seed in seeds:
            failures += filter(None, [try_seed(seed, mismatch)])
            if len(failures) >= stop_after:
                break
        return failures
    # Replace the processes now and then. With max_tasks_per_child, Python 3.11's pool can wait forever.
    for part in (seeds[first : first + FRESH] for first in range(0, len(seeds), FRESH)):
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            for problem in pool.map(try_seed, part, [mismatch] * len(part), chunksize=10):
                failures += filter(None, [problem])
                if len(failures) >= stop_after:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return failures
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stop-after", type=int, default=3)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.count)
    failures = try_seeds(seeds, arguments.mismatch, arguments.processes, arguments.stop_after)
    print("\n\n".join(failures) or "all right")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
