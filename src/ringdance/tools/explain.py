"""``ringdance explain``: show what each rank in a job is doing, and which rank is holding up the others."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import psutil

from ringdance.core.monitor.processes import open_ring
from ringdance.core.reports.dump import main_frames, own_lines, stacks_of, worker_lines
from ringdance.core.reports.procfs import activity, sample_cpu
from ringdance.core.reports.stacks import doing_in, place_of
from ringdance.core.ring import RingReader, Word, steps_text
from ringdance.errors import LaunchError
from ringdance.host.system import linux
from ringdance.launch.background import records
from ringdance.launch.parser import Parser, as_program
from ringdance.tools.hosts.host_set import add_arguments, host_set

_EPILOG = """\
examples:
  ringdance explain                  the only job running on this machine
  ringdance explain 3f2a91c0         one of several jobs, by its ID or the process ID of a rank or of mpiexec
  ringdance explain --stacks         with the stacks of all threads
  ringdance explain -H node1,node2   a job on several hosts

The last line names the rank that the others wait for. Without -H, only the ranks on this machine
are shown. The job may have been started by another launcher.

exit code: 0, or 2 if the job does not exist
"""
_ANSWER_S = 20.0
_SAMPLE_S = 0.2
_MOST_WORKERS = 2
_BEFORE = " without init()"  # suffix for the progress of a rank that has not called init() yet
_WAITS = re.compile(r"core/(?:progress|transfers)\.py(?:\", line |:)\d+(?:\)| in wait\b)")


@dataclass
class _Rank:
    """A running rank and what it is currently doing."""

    number: int
    host: str
    pid: int
    size: int
    job: str
    progress: str
    waits_for: str = ""
    seconds: float = 0.0
    doing: str = ""
    stacks: str = ""
    operation: str = ""  # full name of the operation that the rank is waiting for
    workers: list[str] = field(default_factory=list)  # what each worker process is doing

    @property
    def who(self) -> str:
        return f"rank {self.number} on host {self.host} (pid {self.pid})"

    @property
    def frames(self) -> list[str]:
        """Stack frames of the main thread that are in the user's code, innermost first."""
        return own_lines(main_frames(self.stacks))

    @property
    def place(self) -> str:
        """Line of the user's code that the main thread is executing, as text."""
        return f", at {place_of(self.frames)}" if self.frames else ""

    @property
    def action(self) -> str:
        """What the main thread is doing and where, followed by what the worker processes are doing."""
        others = [f"and {len(self.workers) - _MOST_WORKERS} more"] * (len(self.workers) > _MOST_WORKERS)
        own = f"its main thread {self.doing or 'runs'}{self.place}"
        return "; ".join([own, *self.workers[:_MOST_WORKERS], *others])


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance explain`` with the arguments ``argv``. Returns the exit code."""
    parser = Parser(
        prog="ringdance explain",
        description="Show what each rank of a job is doing, and which rank the others are waiting for.",
        epilog=_EPILOG,
    )
    text = "ID of a job, or of a process in it (default: the only job on this machine)"
    parser.add_argument("target", metavar="JOB|PID", nargs="?", default="", help=text)
    parser.add_argument("--stacks", action="store_true", help="show the stacks of all threads")
    parser.add_argument("--json", action="store_true", help="print the state of each rank as JSON")
    add_arguments(parser)

    def action() -> int:
        arguments = parser.parse_args(list(argv))
        if arguments.hosts or arguments.hostfile:
            ranks = _look_elsewhere(arguments)
        else:
            ranks = _look(_ranks_here(arguments.target))
        if arguments.json:
            print(json.dumps([vars(rank) for rank in ranks]))
        else:
            print("\n".join(_explain_job(_only_job(ranks, arguments.target), arguments.stacks)))
        return 0

    return as_program("ringdance explain", action)


def _ranks_here(target: str) -> list[_Rank]:
    """Return the ranks on this host that belong to a job matching ``target``."""
    jobs: dict[str, list[_Rank]] = {}
    known = set()
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        reader = open_ring(int(pid))
        if reader is not None and reader.who.pid == int(pid) and reader.who.host:  # no host during init()
            if (rank := _rank_of(reader)) is None:
                continue
            known.add((rank.job, rank.number))
            if not reader.words[Word.CLOSED]:
                jobs.setdefault(rank.job, []).append(rank)
    for process, environ in records.rank_processes():
        job, number, size = (environ[name] for name in (linux.MARKER, "RINGDANCE_RANK", "RINGDANCE_SIZE"))
        if (job, int(number)) not in known:
            try:
                below, age = (process, *process.children(recursive=True)), time.time() - process.create_time()
            except psutil.Error:  # the process has just exited
                continue
            state = ", now in init()" if any(open_ring(child.pid) for child in below) else _BEFORE
            progress = f"{age:.0f} s{state}"
            rank = _Rank(int(number), os.uname().nodename, process.pid, int(size), job, progress)
            jobs.setdefault(job, []).append(rank)
    selected: list[_Rank] = []
    for job, ranks in jobs.items():
        of_process = target.isdigit() and any(_is_below(rank.pid, int(target)) for rank in ranks)
        if job.startswith(target) or of_process:
            selected += ranks
    return selected


def _only_job(ranks: list[_Rank], target: str) -> list[_Rank]:
    """Return the ranks in ascending order. Raises LaunchError unless all of them belong to the same job."""
    jobs = {rank.job for rank in ranks}
    if len(jobs) == 1:
        return sorted(ranks, key=lambda rank: rank.number)
    if jobs:
        known = [job for job in [*records.load_all(), *records.without_record()] if job.job in jobs]
        others = [f"{job}: started by another launcher" for job in sorted(jobs - {own.job for own in known})]
        lines = "\n  ".join([*(own.about for own in known), *others])
        raise LaunchError(f"several jobs are running here. Pass the ID of one of them:\n  {lines}")
    here = f"on {os.uname().nodename}"
    if not target:
        raise LaunchError(f"none of your jobs has a rank {here}. Use -H to look at other hosts.")
    record = records.find(target)
    state = {"ended": "it has ended", "lost": "its launcher was killed"}.get(
        record.state, f"it is running on {', '.join(record.hosts)}. To look there, use -H"
    )
    advice = f"`ringdance attach {record.short}` shows its output"
    raise LaunchError(f"job {record.short} has no ranks {here}: {state}. {advice}")


def _look_elsewhere(arguments: argparse.Namespace) -> list[_Rank]:
    """Return the ranks on the hosts given in the arguments. Prints an error for each host that fails."""
    argv = ["ringdance", "explain", "--json", *([arguments.target] if arguments.target else [])]
    with closing(host_set(arguments)) as hosts:
        hosts.connect(arguments.connect_timeout)
        messages = {host: {"task": "run", "argv": argv} for host in hosts.names}
        answers = hosts.ask(messages, timeout=_ANSWER_S)
    ranks: list[_Rank] = []
    for host, answer in answers.items():
        output = answer.get("output", "")
        try:
            for row in json.loads(output.splitlines()[-1]):
                ranks.append(_Rank(**row))
                if ranks[-1].job.isdigit():  # process ID of mpiexec or its daemon on that host
                    ranks[-1].job = "of another launcher"
        except (ValueError, IndexError, TypeError):
            print(f"ringdance explain: {host}: {answer['problem'] or output.strip()}", file=sys.stderr)
    return ranks


def _rank_of(reader: RingReader) -> _Rank | None:
    """Return the rank whose records ``reader`` reads, or None if its process has just exited."""
    number, host, pid = reader.who
    try:
        process = psutil.Process(pid)
        job = process.environ().get(linux.MARKER) or str(process.ppid())  # the pid of mpiexec or its daemon
    except psutil.Error:
        return None
    waits_for, since = reader.name(reader.words[Word.PENDING]), reader.words[Word.PENDING_SINCE]
    seconds = (time.monotonic_ns() - since) / 1e9 if since else 0.0
    size, progress = reader.words[Word.SIZE], steps_text(reader.words)
    operation = reader.pending_name
    return _Rank(number, host, pid, size, job, progress, str(waits_for), seconds, operation=operation)


def _is_below(pid: int, other: int) -> bool:
    """Return True if the process ``pid`` is ``other`` or one of its descendants."""
    try:
        return other == pid or any(parent.pid == other for parent in psutil.Process(pid).parents())
    except psutil.Error:  # the process has just exited
        return False


def _look(ranks: list[_Rank]) -> list[_Rank]:
    """Determine what each rank is currently doing, and return the ranks. All of them must be on this host."""
    samples = {rank.pid: sample_cpu(rank.pid) for rank in ranks}
    time.sleep(_SAMPLE_S if ranks else 0.0)
    for rank in ranks:
        rank.stacks = stacks_of(rank.pid)
        frames = main_frames(rank.stacks)
        inside = frames[: frames.index(rank.frames[0])] if frames else []
        rank.doing = doing_in(inside, activity(rank.pid, before=samples[rank.pid]))
        if rank.stacks and not _WAITS.search(rank.stacks):
            rank.waits_for = ""
        if not rank.waits_for and rank.doing.startswith("waits"):
            _look_at_workers(rank)
    return ranks


def _look_at_workers(rank: _Rank) -> None:
    """Determine what a rank's child processes, such as data loader workers, are doing in the user's code."""
    with suppress(psutil.Error):  # the process has just exited
        for child in psutil.Process(rank.pid).children():
            stacks = stacks_of(child.pid)
            if lines := worker_lines(main_frames(stacks)):
                doing = activity(child.pid) or "runs"
                rank.workers.append(f"its worker process {child.pid} {doing}, at {place_of(lines)}")
                rank.stacks += f"Worker process {child.pid}:\n{stacks.partition(chr(10))[2]}"


def _explain_job(ranks: list[_Rank], stacks: bool) -> Iterator[str]:
    for rank in ranks:
        doing = f"has waited {rank.seconds:.0f} s for '{rank.waits_for}'" if rank.waits_for else rank.action
        yield f"{rank.who}: {doing} (after {rank.progress})"
        yield from (rank.stacks.splitlines() if stacks else [f"    {frame}" for frame in rank.frames])
    missing = sorted(set(range(ranks[0].size)) - {rank.number for rank in ranks})
    if missing:
        yield f"Not seen: {_named(missing)}, which may have exited, or be on hosts that -H does not list."
    yield _culprit(ranks, missing)


def _named(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _culprit(ranks: list[_Rank], missing: list[int]) -> str:
    waiting = [rank for rank in ranks if rank.waits_for]
    late = [rank for rank in ranks if not rank.waits_for]
    early = [rank.number for rank in ranks if rank.progress.endswith(_BEFORE)]
    if not waiting and early:
        return f"All ranks must call init(). It has not been called yet by {_named(early)}."
    if not waiting:
        return "No rank that was seen is waiting." if missing else "No rank is waiting for another."
    if late:
        others = _named([rank.number for rank in waiting]).capitalize()
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"{others} {verb} for {'; and for '.join(f'{rank.who}: {rank.action}' for rank in late)}."
    names = Counter((rank.operation, rank.waits_for) for rank in waiting)
    alike = len({label for _, label in names}) < len(names)  # show full names if labels are ambiguous

    def said(name: tuple[str, str]) -> str:
        return f"'{name[1]}'" + f" ({name[0]})" * (alike and name[0] != name[1])

    if len(names) == 1:
        cause = "and for ranks that were not seen" if missing else "which is being exchanged"
        return f"All ranks here are waiting for '{waiting[0].waits_for}', {cause}."
    usual = names.most_common(1)[0][0]
    odd = [rank for rank in waiting if (rank.operation, rank.waits_for) != usual]
    parts = [f"{rank.who} for {said((rank.operation, rank.waits_for))}{rank.place}" for rank in odd]
    return f"Ranks are waiting for different operations: {'; '.join(parts)}; the others for {said(usual)}."
