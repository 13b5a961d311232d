"""``ringdance tune threads``: threads, binding and ranks per host of a training on CPUs, by its speed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringdance.core.reports.judging import TAKEN
from ringdance.errors import LaunchError
from ringdance.host.limits import usable_cores
from ringdance.host.schedulers.hostfile import HostList, hosts_text
from ringdance.host.system.linux import die_with_parent
from ringdance.launch import subcommands
from ringdance.launch.parser import counts, number, positive
from ringdance.launch.remote.shell import add_host_options, hosts_of, ssh_words
from ringdance.launch.spec import resolve_command
from ringdance.tools.report.figures import Run, read_run
from ringdance.training.tuning.search import order

_EPILOG = """\
The command runs again and again, for --seconds of steady steps or until it ends. Ranks per host vary first,
each with its share of the cores as threads; then intra-op threads (OMP_NUM_THREADS, MKL_NUM_THREADS,
TF_NUM_INTRAOP_THREADS), and binding, each with the best so far. What looks faster takes five turns with the
best so far, and becomes the best only if each of these runs is faster than all runs of the other.

The number of ranks varies only if the command takes the batch of a rank, as {batch}: the batch of all ranks
stays --global-batch. Measured are the steps that DistributedOptimizer or hvd.mark_step() counts.

examples:
  ringdance tune threads --global-batch 256 -- python train.py --batch {batch}
  ringdance tune threads -H h1,h2 --global-batch 512 -- python train.py --batch {batch}

exit code: 0 if a trial was measured, 1 if none was, 2 for a wrong argument, 130 after Ctrl-C"""
_POLL, _WORTH = 0.2, 0.02  # seconds; a gain below which there is none
_TURNS = 5  # runs of each: without a difference all of one are faster than all of the other once in 252 times
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_BINDS = {"off": [0], "on": [1], "both": [0, 1]}


class Setting(NamedTuple):
    """What a trial runs with: ranks on each host, threads of each rank, whether ranks are bound to cores."""

    ranks: int
    intra: int
    bind: int

    def __str__(self) -> str:
        bound = "bound to cores" if self.bind else "not bound"
        return f"ranks per host {self.ranks}, intra-op {self.intra}, {bound}"


Result = tuple[float, str]
"""Steps a second; 0.0 and the reason where there is no such number."""


@dataclass
class Trials:
    """What all trials have in common.

    Attributes:
        given: the arguments.
        hosts: none for this one alone.
        cores: of a host.
        others: largest share of a host's cores that other programs have used in a trial.
    """

    given: argparse.Namespace
    hosts: HostList
    cores: int
    others: float = 0.0

    def line(self, one: Setting) -> list[str]:
        """Return the words after ``ringdance`` that run the command with a setting."""
        total = one.ranks * max(1, len(self.hosts))
        words = ["mpirun" if one.bind else "run", "-np", str(total)]
        if self.hosts:
            words += ["-H", hosts_text([(name, one.ranks) for name, _ in self.hosts]), *ssh_words(self.given)]
        if one.bind:
            each = f"slot:PE={max(1, self.cores // one.ranks)}"  # hardware threads: what is counted here
            words += ["-use-hwthread-cpus", "-bind-to", "hwthread", "-map-by", each]
        words += [word for name in _THREADS for word in ("-x", f"{name}={one.intra}")]
        batch = str(self.given.global_batch // total)
        return words + [word.replace("{batch}", batch) for word in self.given.command]

    def run(self, one: Setting, directory: Path) -> Result:
        """Run the command until it is measured; nothing of it is left, whatever happens."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        kind, *words = self.line(one)
        line = [sys.executable, "-m", "ringdance", kind, "--output-filename", str(directory / "out"), *words]
        environ = os.environ | {"RINGDANCE_METRICS_INTERVAL": "0.2", "PYTHONUNBUFFERED": "1"}
        with open(directory / "log", "wb") as log:
            job = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True,
                preexec_fn=die_with_parent,  # after SIGKILL of this process: the job then ends as well
            )  # fmt: skip
        try:
            return self._measure(job, directory)
        finally:  # by signals as from a person: the launcher then leaves nothing
            for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGINT, 10.0), (signal.SIGKILL, None)):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    job.send_signal(number)
                    job.wait(patience)

    def _measure(self, job: subprocess.Popen[bytes], directory: Path) -> Result:
        """Wait until a trial has a speed."""
        until = time.monotonic() + self.given.limit + self.given.seconds
        run = None
        while (code := job.poll()) is None:
            time.sleep(_POLL)
            run = _figures(directory)
            if run and _steady(run) >= self.given.seconds:
                break
            if time.monotonic() > until:
                return 0.0, f"too few steps within {self.given.limit:g} s (--limit)"
        else:
            run = None if code else _figures(directory)
        if run:
            self.others = max(self.others, *(run.taken(host) for host in run.hosts))
            return run.steps_per_second, ""
        said = (directory / "log").read_text(errors="replace").strip().splitlines()
        last = next((text for text in said if text.startswith("first failure: ")), (said or [""])[-1])
        return 0.0, f"exit code {code}: {last}" if code else "no steps counted; mark them by hvd.mark_step()"

    def table(self, best: Setting, found: Mapping[Setting, list[Result]]) -> Table:
        """Return all trials, the fastest first."""
        names = ("ranks per host", "intra-op", "bound", "batch of a rank")
        table = Table(*names, "steps/s", "from", "to", "runs", box=SIMPLE_HEAD)
        for one, results in sorted(found.items(), key=lambda item: -_speed_of(item[1])):
            batch = self.given.global_batch // (one.ranks * max(1, len(self.hosts)))
            cells = (str(one.ranks), str(one.intra), "yes" if one.bind else "no", str(batch or ""))
            speeds = [speed for speed, _ in results]
            figures = [f"{speed:.4g}" for speed in (_speed_of(results), min(speeds), max(speeds))]
            figures = figures if _speed_of(results) else ["failed", "", ""]
            table.add_row(*cells, *figures, str(len(results)), style="bold" if one == best else "")
        return table


def _speed_of(results: Sequence[Result]) -> float:
    return median(speed for speed, _ in results)


def _figures(directory: Path) -> Run | None:
    """Return the figures of a trial, once it has taken steps."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a line that is being written
            return read_run(directory / "out")
    except LaunchError:
        return None


def _steady(run: Run) -> float:
    """Return the seconds of steps that a speed rests on."""
    times = [row["last_step_time"] for row in run.ranks[0].training if "last_step_time" in row] or [0.0]
    return float(times[-1] - times[0])


def search(
    space: Mapping[str, Sequence[int]], cores: int, run: Callable[[Setting], Result]
) -> tuple[Setting, dict[Setting, list[Result]]]:
    """Try settings; return the best one, and the results in their order.

    Args:
        space: candidates by the name of a setting's field, in their order.
        cores: of a host, shared out to its ranks.
        run: runs a trial.
    """
    shared = {n: min(space["intra"], key=lambda threads: abs(threads - cores // n)) for n in space["ranks"]}
    starts = [Setting(n, shared[n], space["bind"][0]) for n in reversed(space["ranks"])]
    best, found = starts[0], defaultdict[Setting, list[Result]](list)

    def is_faster(one: Setting, than: Setting) -> bool:
        """Compare in turns, for speeds change with what else runs; ends when it cannot be sure any more."""
        speeds: tuple[list[float], list[float]] = [], []
        for turn in range(_TURNS):
            for which in order(turn):
                found[(than, one)[which]].append(run((than, one)[which]))
                speeds[which].append(found[(than, one)[which]][-1][0])
            if min(speeds[1]) <= max(speeds[0]):
                return False
        return median(speeds[1]) > median(speeds[0]) * (1 + _WORTH)

    def look(candidates: Sequence[Setting]) -> None:
        nonlocal best
        for one in candidates:
            if one not in found:
                found[one].append(run(one))
        if not _speed_of(found[best]):
            best = next((one for one in candidates if _speed_of(found[one])), best)
        for one in sorted(candidates, key=lambda one: -_speed_of(found[one])):
            if _speed_of(found[one]) > _speed_of(found[best]) * (1 + _WORTH) and is_faster(one, best):
                best = one

    look(starts)
    for name in ("intra", "bind"):
        look([best._replace(**{name: value}) for value in space[name]])
    return best, found


def _space(given: argparse.Namespace, cores: int, hosts: int) -> dict[str, list[int]]:
    """Return the candidates. Raises LaunchError where the arguments do not fit each other."""
    batch, powers = given.global_batch, [n for n in range(1, cores + 1) if n == cores or not n & (n - 1)]
    has_batch = any("{batch}" in word for word in given.command)
    if has_batch != bool(batch):
        missing = "--global-batch N" if has_batch else "{batch} in the command, for the batch of a rank"
        raise LaunchError(f"--global-batch and {{batch}} need each other: add {missing}")
    ranks = given.ranks or (powers if has_batch else [1])
    if not has_batch:
        if len(ranks) > 1:
            raise LaunchError(f"--ranks {ranks}: the batch of all ranks would change. Write {{batch}} for "
                              "that of a rank in the command, and give --global-batch")  # fmt: skip
        print("The command has no {batch}: the number of ranks is not varied.", file=sys.stderr)
    fit = [n for n in ranks if batch % (n * hosts) == 0]
    if not fit:
        near = -(-batch // (ranks[0] * hosts)) * ranks[0] * hosts
        problem = f"--global-batch {batch} cannot be divided among {ranks} ranks on each of {hosts} hosts"
        raise LaunchError(f"{problem}. Give --global-batch {near}")
    if left := [n for n in ranks if n not in fit]:
        print(f"Left out, as they do not divide {batch}: {left} ranks per host.", file=sys.stderr)
    return {"ranks": fit, "intra": given.intra or powers, "bind": _BINDS[given.bind]}


def _threads(given: argparse.Namespace) -> int:
    resolve_command(given.command[:1])
    hosts = hosts_of(given) or []
    trials = Trials(given, hosts, usable_cores())
    space = _space(given, trials.cores, max(1, len(trials.hosts)))
    for signum in (signal.SIGTERM, signal.SIGHUP):  # leave as little behind as Ctrl-C
        if signal.getsignal(signum) != signal.SIG_IGN:  # as after nohup
            signal.signal(signum, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ringdance-threads-") as directory:

        def run(one: Setting) -> Result:
            print(f"{one}: ", end="", file=sys.stderr, flush=True)
            speed, reason = trials.run(one, Path(directory, "trial"))
            print(f"{speed:.4g}" if speed else f"failed: {reason}", file=sys.stderr)
            return speed, reason

        best, found = search(space, trials.cores, run)
    Console(highlight=False).print(trials.table(best, found))
    for one, results in found.items():
        for reason in dict.fromkeys(reason for _, reason in results if reason):
            print(f"failed: {one}: {reason}")
    if trials.others >= TAKEN:
        share = f"{trials.others:.0%} of a host's cores"
        print(f"WARNING: other programs used up to {share} while a trial ran: measure again without them.")
    if not _speed_of(found[best]):
        return 1
    first = next(one for one, results in found.items() if _speed_of(results))
    print("Best" if best != first else "Nothing was surely faster than the first", end="")
    print(f": {best}; ready to run:\n{shlex.join(['ringdance', *trials.line(best)])}")
    return 0


def _add_threads(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--global-batch", type=positive, default=0, metavar="N", help="of all ranks")
    add("--ranks", type=counts, metavar="A,B", help="ranks per host to try (default: 1, 2, 4, ... cores)")
    add("--intra", type=counts, metavar="A,B", help="intra-op threads to try (default: the same)")
    add("--bind", choices=_BINDS, default="both", help="ranks bound to cores (default: both)")
    add("--seconds", type=number, default=20.0, metavar="S", help="of steady steps in a trial (default 20)")
    add("--limit", type=number, default=300.0, metavar="S", help="for the start of a trial (default 300)")
    add_host_options(parser, "hosts, with as many cores as this one (default: this one); slots do not count")
    add("command", nargs="+", metavar="COMMAND", help="after --: the training and its arguments")


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance tune`` with the words after it; returns the exit code."""
    text = "find the best threads, binding and ranks per host of a training on CPUs"
    known = {"threads": subcommands.Subcommand(_threads, text, _add_threads, _EPILOG)}
    return subcommands.run("ringdance tune", "Tune a training by trials of it.", known, argv)
