"""``ringdance tune threads``: threads, binding and ranks per host of a training on CPUs, by its speed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringdance import subcommands
from ringdance.cluster.hostfile import HostList, parse_hosts
from ringdance.errors import LaunchError
from ringdance.launch.parser import counts, positive, seconds
from ringdance.launch.spec import resolve_command
from ringdance.launch.system.linux import die_with_parent, usable_cores
from ringdance.observe.figures import read_run

_EPILOG = """\
The command runs again and again, for --seconds of steady steps or until it ends. Ranks per host vary first,
each with its share of the cores as threads; then intra-op threads (TF_NUM_INTRAOP_THREADS, OMP_NUM_THREADS,
MKL_NUM_THREADS), inter-op threads (TF_NUM_INTEROP_THREADS), and binding, each with the best so far.

The number of ranks varies only if the command takes the batch of a rank, as {batch}: the batch of all ranks
stays --global-batch. Measured are the steps that DistributedOptimizer or hvd.mark_step() counts; for other
scripts, numbers that --metric finds in their output (larger is better).

examples:
  ringdance tune threads --global-batch 256 -- python train.py --batch {batch}
  ringdance tune threads -H h1,h2 --global-batch 512 --grid -- python train.py --batch {batch}
  ringdance tune threads --metric 'images/s: (\\S+)' -- python train.py

exit code: 0 if a trial was measured, 1 if none was, 2 for a wrong argument, 130 after Ctrl-C"""
_POLL, _WORTH = 0.2, 0.02  # seconds; a gain below which there is none
_NUMBER = re.compile(r"\d*\.?\d+(e[+-]?\d{1,2})?|\d+\.", re.IGNORECASE)
_BINDS = {"off": [0], "on": [1], "both": [0, 1]}


class Setting(NamedTuple):
    """What a trial runs with: ranks on each host, threads of each rank, whether ranks are bound to cores."""

    ranks: int
    intra: int
    inter: int
    bind: int

    def __str__(self) -> str:
        bound = "bound to cores" if self.bind else "not bound"
        return f"ranks per host {self.ranks}, intra-op {self.intra}, inter-op {self.inter}, {bound}"


Result = tuple[float, str]
"""Steps, or what the metric counts, a second; 0.0 and the reason where there is no such number."""


class Trials(NamedTuple):
    """What all trials have in common: the arguments, the hosts (none for this one alone), their cores."""

    given: argparse.Namespace
    hosts: HostList
    cores: int

    def line(self, one: Setting) -> list[str]:
        """Return the words after ``ringdance`` that run the command with a setting."""
        total = one.ranks * max(1, len(self.hosts))
        words = ["mpirun" if one.bind else "run", "-np", str(total)]
        if self.hosts:
            words += ["-H", ",".join(f"{name}:{one.ranks}" for name, _ in self.hosts)]
        if one.bind:
            words += ["-bind-to", "core", "-map-by", f"slot:PE={max(1, self.cores // one.ranks)}"]
        names = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        threads = dict.fromkeys(names, one.intra) | {"TF_NUM_INTEROP_THREADS": one.inter}
        words += [word for name, count in threads.items() for word in ("-x", f"{name}={count}")]
        batch = str(self.given.global_batch // total)
        return words + [word.replace("{batch}", batch) for word in self.given.command]

    def run(self, one: Setting, directory: Path) -> Result:
        """Run the command until it is measured; nothing of it is left, whatever happens."""
        directory.mkdir()
        kind, *words = self.line(one)
        line = [sys.executable, "-m", "ringdance", kind, "--output-filename", str(directory / "out"), *words]
        environ = os.environ | {"RINGDANCE_METRICS_INTERVAL": "0.2", "PYTHONUNBUFFERED": "1"}
        began = first = time.monotonic()
        with open(directory / "log", "wb") as log:
            job = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True,
                preexec_fn=die_with_parent,  # after SIGKILL of this process: the job then ends as well
            )  # fmt: skip
        try:
            while (code := job.poll()) is None:
                time.sleep(_POLL)
                speed, steady = self._speed(directory)
                first = first if speed else time.monotonic()
                if (time.monotonic() - first if self.given.metric else steady) >= self.given.seconds:
                    return speed, ""
                if time.monotonic() - (first if speed else began) > self.given.limit + self.given.seconds:
                    return 0.0, f"too few steps within {self.given.limit:g} s (--limit)"
            speed = self._speed(directory)[0] if not code else 0.0
            said = (directory / "log").read_text(errors="replace").strip().splitlines()
            last = next((text for text in said if text.startswith("first failure: ")), (said or [""])[-1])
            none = "no number matches --metric" if self.given.metric else "no steps counted; see --metric"
            return speed, "" if speed else f"exit code {code}: {last}" if code else none
        finally:  # by signals as from a person: the launcher then leaves nothing
            for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGINT, 10.0), (signal.SIGKILL, None)):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    job.send_signal(number)
                    job.wait(patience)

    def _speed(self, directory: Path) -> tuple[float, float]:
        """Return the speed so far, 0.0 for none, and the seconds of steps that it rests on."""
        if self.given.metric:
            text = (directory / "log").read_text(errors="replace")
            words = [(one[1] or "").replace(",", "") for one in self.given.metric.finditer(text)]
            found = [float(word) for word in words if _NUMBER.fullmatch(word)]  # not nan, which nothing beats
            return median(found[1:] or found or [0.0]), 0.0  # the first one has the start in it
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # a line that is being written
                run = read_run(directory / "out")
        except LaunchError:
            return 0.0, 0.0
        times = [row["last_step_time"] for row in run.ranks[0].training if "last_step_time" in row] or [0.0]
        return run.steps_per_second, times[-1] - times[0]

    def table(self, best: Setting, found: Mapping[Setting, Result]) -> Table:
        """Return all trials, the fastest first."""
        names = ("ranks per host", "intra-op", "inter-op", "bound", "batch of a rank")
        table = Table(*names, "metric" if self.given.metric else "steps/s", "of best", box=SIMPLE_HEAD)
        for one, (speed, _) in sorted(found.items(), key=lambda item: -item[1][0]):
            batch = self.given.global_batch // (one.ranks * max(1, len(self.hosts)))
            cells = (*map(str, one[:3]), "yes" if one.bind else "no", str(batch or ""))
            figures = (f"{speed:.4g}", f"{speed / found[best][0]:.0%}") if speed else ("failed", "")
            table.add_row(*cells, *figures, style="bold" if one == best else "")
        return table


def search(
    space: Mapping[str, Sequence[int]], cores: int, grid: bool, run: Callable[[Setting], Result]
) -> tuple[Setting, dict[Setting, Result]]:
    """Try settings; return the best one, and the results in their order.

    Args:
        space: candidates by the name of a setting's field, in their order.
        cores: of a host, shared out to its ranks.
        grid: whether all combinations are tried, not one field after the other.
        run: runs a trial.
    """
    shared = {n: min(space["intra"], key=lambda threads: abs(threads - cores // n)) for n in space["ranks"]}
    starts = [Setting(n, shared[n], space["inter"][0], space["bind"][0]) for n in reversed(space["ranks"])]
    best, found = starts[0], dict[Setting, Result]()

    def look(candidates: Iterable[Setting]) -> None:
        nonlocal best
        for one in candidates:
            if one not in found:
                found[one] = run(one)
            if found[one][0] > found[best][0] * (1 + _WORTH):
                best = one

    look(starts)
    if grid:
        look(Setting(*values) for values in product(*space.values()))
    for name in ("intra", "inter", "bind"):
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
        raise LaunchError(f"--global-batch {batch}: {ranks} ranks per host on {hosts} do not divide it")
    if left := [n for n in ranks if n not in fit]:
        print(f"Left out, as they do not divide {batch}: {left} ranks per host.", file=sys.stderr)
    return {"ranks": fit, "intra": given.intra or powers, "inter": given.inter, "bind": _BINDS[given.bind]}


def _threads(given: argparse.Namespace) -> int:
    resolve_command(given.command[:1])
    trials = Trials(given, parse_hosts(given.hosts) if given.hosts else [], usable_cores())
    space = _space(given, trials.cores, max(1, len(trials.hosts)))
    for number in (signal.SIGTERM, signal.SIGHUP):  # leave as little behind as Ctrl-C
        if signal.getsignal(number) != signal.SIG_IGN:  # as after nohup
            signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ringdance-threads-") as directory:

        def run(one: Setting) -> Result:
            print(f"{one}: ", end="", file=sys.stderr, flush=True)
            speed, reason = trials.run(one, Path(directory, "-".join(map(str, one))))
            print(f"{speed:.4g}" if speed else f"failed: {reason}", file=sys.stderr)
            return speed, reason

        best, found = search(space, trials.cores, given.grid, run)
    Console(highlight=False).print(trials.table(best, found))
    for one in [one for one in found if not found[one][0]]:
        print(f"failed: {one}: {found[one][1]}")
    if found[best][0]:
        print(f"Best: {best}; ready to run:\n{shlex.join(['ringdance', *trials.line(best)])}")
    return 0 if found[best][0] else 1


def _regex(text: str) -> re.Pattern[str]:
    with contextlib.suppress(re.error):
        if (found := re.compile(text)).groups == 1:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no regular expression with one group, for the number")


def _add_threads(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--global-batch", type=positive, default=0, metavar="N", help="of all ranks")
    add("--ranks", type=counts, metavar="A,B", help="ranks per host to try (default: 1, 2, 4, ... cores)")
    add("--intra", type=counts, metavar="A,B", help="intra-op threads to try (default: the same)")
    add("--inter", type=counts, default=[1, 2], metavar="A,B", help="inter-op threads (default: 1,2)")
    add("--bind", choices=_BINDS, default="both", help="ranks bound to cores (default: both)")
    add("--grid", action="store_true", help="try all combinations")
    add("--metric", type=_regex, metavar="REGEX", help="finds the speed in the output, as its one group")
    add("--seconds", type=seconds, default=20.0, metavar="S", help="of steady steps in a trial (default 20)")
    add("--limit", type=seconds, default=300.0, metavar="S", help="for the start of a trial (default 300)")
    add("-H", "--hosts", metavar="H1,H2", help="hosts, with as many cores as this one (default: this one)")
    add("command", nargs="+", metavar="COMMAND", help="after --: the training and its arguments")


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance tune`` with the words after it; returns the exit code."""
    text = "find the best threads, binding and ranks per host of a training on CPUs"
    known = {"threads": subcommands.Subcommand(_threads, text, _add_threads, _EPILOG)}
    return subcommands.run("ringdance tune", "Tune a training by trials of it.", known, argv)
