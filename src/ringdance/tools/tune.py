"""``ringdance tune threads``: find the fastest combination of threads, binding and ranks per host."""

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
from ringdance.tools.report.metrics import RunMetrics, read_run
from ringdance.training.tuning.search import order

_EPILOG = """\
The command is run repeatedly, each time for --seconds of steady steps or until it ends. First, it is run with
different numbers of ranks per host, where each rank uses its share of the cores as threads. Next come the
intra-op threads (OMP_NUM_THREADS, MKL_NUM_THREADS, TF_NUM_INTRAOP_THREADS), and then binding, both with the
best setting so far. A setting that looks faster is compared with the best one in five alternating runs each.
It becomes the best setting only if all its runs are faster than all runs of the other setting.

The number of ranks is varied only if the command contains {batch}, the batch size per rank, so that the batch
size of all ranks together is always --global-batch. Only steps that DistributedOptimizer or hvd.mark_step()
counts are measured.

examples:
  ringdance tune threads --global-batch 256 -- python train.py --batch {batch}
  ringdance tune threads -H h1,h2 --global-batch 512 -- python train.py --batch {batch}

exit code: 0 if a trial was measured, 1 if not, 2 for a wrong argument, 130 after Ctrl-C"""
_POLL, _WORTH = 0.2, 0.02  # polling interval in seconds; minimum relative gain
_TURNS = 5  # runs per setting; an equal setting seems faster only once in C(10, 5) = 252 comparisons
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_BINDS = {"off": [0], "on": [1], "both": [0, 1]}


class Setting(NamedTuple):
    """The setting of a trial: ranks per host, threads per rank, and whether ranks are bound to cores."""

    ranks: int
    intra: int
    bind: int

    def __str__(self) -> str:
        bound = "bound to cores" if self.bind else "not bound"
        return f"ranks per host {self.ranks}, intra-op {self.intra}, {bound}"


Result = tuple[float, str]
"""Steps per second (0.0 if unknown), and the reason why the speed is unknown ("" if it is known)."""


@dataclass
class Trials:
    """State shared by all trials.

    Attributes:
        given: Command-line arguments.
        hosts: Hosts on which to run trials. If empty, trials run only on this host.
        cores: Cores per host.
        others: Maximum share of a host's cores that other programs used during a trial.
    """

    given: argparse.Namespace
    hosts: HostList
    cores: int
    others: float = 0.0

    def line(self, one: Setting) -> list[str]:
        """Return the arguments with which ``ringdance`` runs the user's command with a setting."""
        total = one.ranks * max(1, len(self.hosts))
        words = ["mpirun" if one.bind else "run", "-np", str(total)]
        if self.hosts:
            words += ["-H", hosts_text([(name, one.ranks) for name, _ in self.hosts]), *ssh_words(self.given)]
        if one.bind:
            each = f"slot:PE={max(1, self.cores // one.ranks)}"  # hardware threads, as ``cores`` counts them
            words += ["-use-hwthread-cpus", "-bind-to", "hwthread", "-map-by", each]
        words += [word for name in _THREADS for word in ("-x", f"{name}={one.intra}")]
        batch = str(self.given.global_batch // total)
        return words + [word.replace("{batch}", batch) for word in self.given.command]

    def run(self, one: Setting, directory: Path) -> Result:
        """Run the user's command until its speed is known. Ends all of its processes before returning."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        kind, *words = self.line(one)
        line = [sys.executable, "-m", "ringdance", kind, "--output-filename", str(directory / "out"), *words]
        environ = os.environ | {"RINGDANCE_METRICS_INTERVAL": "0.2", "PYTHONUNBUFFERED": "1"}
        with open(directory / "log", "wb") as log:
            job = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True,
                preexec_fn=die_with_parent,  # ends the job even if this process receives SIGKILL
            )  # fmt: skip
        try:
            return self._measure(job, directory)
        finally:  # use the signals that a user would send, so that the launcher cleans up
            for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGINT, 10.0), (signal.SIGKILL, None)):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    job.send_signal(number)
                    job.wait(patience)

    def _measure(self, job: subprocess.Popen[bytes], directory: Path) -> Result:
        """Wait until the trial's speed is known. Returns the speed and "", or 0.0 and the reason."""
        until = time.monotonic() + self.given.limit + self.given.seconds
        run = None
        while (code := job.poll()) is None:
            time.sleep(_POLL)
            run = _metrics(directory)
            if run and _steady(run) >= self.given.seconds:
                break
            if time.monotonic() > until:
                return 0.0, f"too few steps within {self.given.limit:g} s (--limit)"
        else:
            run = None if code else _metrics(directory)
        if run:
            self.others = max(self.others, *(run.taken(host) for host in run.hosts))
            return run.steps_per_second, ""
        lines = (directory / "log").read_text(errors="replace").strip().splitlines()
        last = next((text for text in lines if text.startswith("first failure: ")), (lines or [""])[-1])
        return 0.0, f"exit code {code}: {last}" if code else "no steps counted: call hvd.mark_step()"

    def table(self, best: Setting, found: Mapping[Setting, list[Result]]) -> Table:
        """Return a table of all trials, fastest first."""
        names = ("ranks per host", "intra-op", "bound", "batch of a rank")
        table = Table(*names, "steps/s", "from", "to", "runs", box=SIMPLE_HEAD)
        for trial, results in sorted(found.items(), key=lambda item: -_speed_of(item[1])):
            batch = self.given.global_batch // (trial.ranks * max(1, len(self.hosts)))
            cells = (str(trial.ranks), str(trial.intra), "yes" if trial.bind else "no", str(batch or ""))
            speeds = [speed for speed, _ in results]
            shown = [f"{speed:.4g}" for speed in (_speed_of(results), min(speeds), max(speeds))]
            shown = shown if _speed_of(results) else ["failed", "", ""]
            table.add_row(*cells, *shown, str(len(results)), style="bold" if trial == best else "")
        return table


def _speed_of(results: Sequence[Result]) -> float:
    return median(speed for speed, _ in results)


def _metrics(directory: Path) -> RunMetrics | None:
    """Return a trial's metrics, or None if it has not completed any steps yet."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # suppress warnings about incomplete lines
            return read_run(directory / "out")
    except LaunchError:
        return None


def _steady(run: RunMetrics) -> float:
    """Return for how many seconds the speed has been measured so far."""
    times = [row["last_step_time"] for row in run.ranks[0].training if "last_step_time" in row] or [0.0]
    return float(times[-1] - times[0])


def search(
    space: Mapping[str, Sequence[int]], cores: int, run: Callable[[Setting], Result]
) -> tuple[Setting, dict[Setting, list[Result]]]:
    """Search for the fastest setting. Returns this setting, and the results of all settings tried.

    Args:
        space: Candidate values for each field of a setting, in the order in which to try them.
        cores: Cores per host, shared by the ranks on it.
        run: Runs a trial.
    """
    shared = {n: min(space["intra"], key=lambda threads: abs(threads - cores // n)) for n in space["ranks"]}
    starts = [Setting(n, shared[n], space["bind"][0]) for n in reversed(space["ranks"])]
    best, tried = starts[0], defaultdict[Setting, list[Result]](list)

    def is_faster(one: Setting, than: Setting) -> bool:
        """Return True if ``one`` is faster than ``than``, based on alternating runs of both settings.

        Runs alternate because the load from other programs varies. Once the speeds of the two settings
        overlap, the remaining runs are skipped.
        """
        speeds: tuple[list[float], list[float]] = [], []
        for turn in range(_TURNS):
            for which in order(turn):
                tried[(than, one)[which]].append(run((than, one)[which]))
                speeds[which].append(tried[(than, one)[which]][-1][0])
            if min(speeds[1]) <= max(speeds[0]):
                return False
        return median(speeds[1]) > median(speeds[0]) * (1 + _WORTH)

    def look(candidates: Sequence[Setting]) -> None:
        nonlocal best
        for setting in candidates:
            if setting not in tried:
                tried[setting].append(run(setting))
        if not _speed_of(tried[best]):
            best = next((setting for setting in candidates if _speed_of(tried[setting])), best)
        for setting in sorted(candidates, key=lambda setting: -_speed_of(tried[setting])):
            if _speed_of(tried[setting]) > _speed_of(tried[best]) * (1 + _WORTH) and is_faster(setting, best):
                best = setting

    look(starts)
    for name in ("intra", "bind"):
        look([best._replace(**{name: value}) for value in space[name]])
    return best, tried


def _space(given: argparse.Namespace, cores: int, hosts: int) -> dict[str, list[int]]:
    """Return the candidate values of each ``Setting`` field. Raises LaunchError if the arguments conflict."""
    batch, powers = given.global_batch, [n for n in range(1, cores + 1) if n == cores or not n & (n - 1)]
    has_batch = any("{batch}" in word for word in given.command)
    if has_batch != bool(batch):
        missing = "--global-batch N" if has_batch else "{batch} in the command, for the batch per rank"
        raise LaunchError(f"--global-batch and {{batch}} must be used together. Add {missing}.")
    ranks = given.ranks or (powers if has_batch else [1])
    if not has_batch:
        if len(ranks) > 1:
            raise LaunchError(f"--ranks {ranks}: the total batch size would change. Write {{batch}} for "
                              "the batch per rank in the command, and pass --global-batch")  # fmt: skip
        print("The command does not contain {batch}, so the number of ranks is not varied.", file=sys.stderr)
    fit = [n for n in ranks if batch % (n * hosts) == 0]
    if not fit:
        near = -(-batch // (ranks[0] * hosts)) * ranks[0] * hosts
        problem = f"--global-batch {batch} cannot be divided among {ranks} ranks per host, hosts: {hosts}"
        raise LaunchError(f"{problem}. Use --global-batch {near}.")
    if left := [n for n in ranks if n not in fit]:
        print(f"Skipping {left} ranks per host: {batch} cannot be divided among them.", file=sys.stderr)
    return {"ranks": fit, "intra": given.intra or powers, "bind": _BINDS[given.bind]}


def _threads(given: argparse.Namespace) -> int:
    resolve_command(given.command[:1])
    hosts = hosts_of(given) or []
    trials = Trials(given, hosts, usable_cores())
    space = _space(given, trials.cores, max(1, len(trials.hosts)))
    for signum in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ringdance-threads-") as directory:

        def run(one: Setting) -> Result:
            print(f"{one}: ", end="", file=sys.stderr, flush=True)
            speed, reason = trials.run(one, Path(directory, "trial"))
            print(f"{speed:.4g}" if speed else f"failed: {reason}", file=sys.stderr)
            return speed, reason

        best, tried = search(space, trials.cores, run)
    Console(highlight=False).print(trials.table(best, tried))
    for setting, results in tried.items():
        for reason in dict.fromkeys(reason for _, reason in results if reason):
            print(f"failed: {setting}: {reason}")
    if trials.others >= TAKEN:
        share = f"{trials.others:.0%} of a host's cores"
        print(f"WARNING: other programs used up to {share} during a trial. Run this again without them.")
    if not _speed_of(tried[best]):
        return 1
    first = next(setting for setting, results in tried.items() if _speed_of(results))
    print("Best" if best != first else "No setting was clearly faster than the first", end="")
    print(f": {best}. Ready to run:\n{shlex.join(['ringdance', *trials.line(best)])}")
    return 0


def _add_threads(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--global-batch", type=positive, default=0, metavar="N", help="total batch size of all ranks")
    add("--ranks", type=counts, metavar="A,B", help="ranks per host to try (default: 1, 2, 4, ... cores)")
    add("--intra", type=counts, metavar="A,B", help="intra-op threads to try (default: 1, 2, 4, ... cores)")
    add("--bind", choices=_BINDS, default="both", help="bind ranks to cores, or try both (default: both)")
    add("--seconds", type=number, default=20.0, metavar="S", help="seconds to measure per run (default: 20)")
    add("--limit", type=number, default=300.0, metavar="S", help="seconds allowed for startup (default: 300)")
    add_host_options(parser, "hosts, with as many cores as this one; slots are ignored (default: this host)")
    add("command", nargs="+", metavar="COMMAND", help="after --: the training command and its arguments")


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance tune`` with the arguments ``argv``. Returns the exit code."""
    text = "find the best threads, binding and ranks per host for training on CPUs"
    known = {"threads": subcommands.Subcommand(_threads, text, _add_threads, _EPILOG)}
    return subcommands.run("ringdance tune", "Tune a training command with trials.", known, argv)
