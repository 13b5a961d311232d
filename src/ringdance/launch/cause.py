"""Why a job failed: the first failure among those that follow from it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

MARK = b"::ringdance-cause::"
"""Marks the line on stderr in which a failing rank reports why, as JSON; see :func:`parse_mark`."""

OUTCOME_FILE = "ringdance-outcome.json"
"""File in the output directory of a job that has ended; see :func:`write_outcome`."""

# Errors by which a rank reports another's end; never the first failure if there is another.
OF_OTHERS = ("RankLostError", "ShutDownError", "StallError", "DeadlockError")
# Of all threads that Python's faulthandler lists, the one in which the signal arose.
_CRASHED_THREAD = re.compile(r"^Current thread .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_LONGEST_LINE = 300
_LOST_PEER = "MPI_ERR_PROC_FAILED"  # what mpi4py raises where a peer has died
# Codes with which Open MPI ends a process whose peer has died: its MPI_ERR_UNKNOWN ("Socket closed") and
# MPI_ERR_PROC_FAILED.
_LOST_PEER_CODES = (14, 75, 76)
_RECORD = re.compile(r" \(Last batches: \S+\)")
_KILLED = "by hand, or by the kernel for want of memory (see dmesg)"
_LATE_S = 0.5  # peers may notice a rank's end before its wrapper does


@dataclass(frozen=True)
class Cause:
    """A failure.

    Attributes:
        rank: whose, or None if it is not a rank's (mpiexec's, an agent's).
        host: name of its machine.
        pid: of the process.
        time: seconds since the epoch.
        kind: "exception", "exit" (ended early), "code", "peer" (by the MPI library), "signal", "ended" (by
            mpiexec), "early", "vanished", "launcher", "daemon" (mpiexec's on another host ended), or, about
            another rank's failure, "lost", "stall".
        message: one line.
        traceback: several lines, or "".
        code: the job's exit code, for kind "launcher".
    """

    rank: int | None
    host: str
    pid: int
    time: float
    kind: str
    message: str
    traceback: str = ""
    code: int = 1

    def same(self, other: Cause) -> bool:
        """Whether another rank has failed with the same error."""
        return _RECORD.sub("", self.message) == _RECORD.sub("", other.message)

    @property
    def follows(self) -> bool:
        """Whether it reports another rank's failure."""
        error = self.message.partition(":")[0].rpartition(".")[2]
        return self.kind in ("lost", "stall") or error in OF_OTHERS or _LOST_PEER in self.message

    @property
    def of_an_end(self) -> bool:
        """Whether it reports that another rank has ended."""
        return self.follows and ("RankLostError" in self.message or _LOST_PEER in self.message)

    def names(self, ended: Ended) -> bool:
        """Whether it reports that rank's end."""
        who = f"rank {ended.rank} on host {ended.host} (pid {ended.pid})"  # transport.base.Identity
        return self.of_an_end and who in self.message.partition(" died while ")[0]


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        rank, host, pid: which.
        code: exit code, -signal, or None if its wrapper vanished without a report.
        time: seconds since the epoch.
        last_words: the traceback that stood last on its stderr, or "".
        last_line: the last line on its stderr, or "".
        by_launcher: it ended after the launcher had begun to end the job.
        by_mpiexec: it ended after mpiexec had ended its wrapper.
        why: what its host shows of a signal's reason, or "".
    """

    rank: int
    host: str
    pid: int
    code: int | None
    time: float
    last_words: str = ""
    by_launcher: bool = False
    by_mpiexec: bool = False
    last_line: str = ""
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether it did not complete; a rank whose wrapper mpiexec killed has not, whatever its code."""
        return self.code != 0 or self.by_mpiexec

    def cause(self, kind: str, message: str, traceback: str = "") -> Cause:
        """Return the cause that it is; arguments as of :class:`Cause`."""
        return Cause(self.rank, self.host, self.pid, self.time, kind, message, traceback)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a failed job: the cause, the exit code (never 0), and the failures that followed."""

    cause: Cause
    code: int
    others: tuple[Cause, ...]

    @property
    def follows(self) -> bool:
        """Whether the cause is that something else has ended, which may still be reported."""
        return self.cause.kind in ("ended", "peer", "early") or self.cause.of_an_end


def parse_mark(line: bytes) -> Cause | None:
    """Return the cause in a marked line; None if it is not one (then it is text like any other)."""
    try:
        return Cause(**json.loads(line.partition(MARK)[2]))
    except (ValueError, TypeError):
        return None


def exit_code(code: int | None) -> int:
    """Return the code as a shell has it: 128 + signal; a process that vanished counts as killed."""
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """``SIGKILL``, or the number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def of_end(ended: Ended) -> Cause | None:
    """Return the failure that a rank's end is, or None."""
    if not ended.failed:
        return None
    last, traceback = ended.last_words.splitlines(), ended.last_words
    if ended.code is None:
        text = ended.why or "its wrapper process vanished (killed?), and the rank with it"
        kind, message = "vanished", text
    elif ended.by_mpiexec:
        kind, message = "ended", "ended by mpiexec"
    elif ended.code in _LOST_PEER_CODES and not last:
        kind, message = "peer", f"exited with code {ended.code}, as by Open MPI where another rank has ended"
    elif ended.code < 0:
        kind, message = "signal", f"killed by {signal_name(-ended.code)} (signal {-ended.code})"
        if why := ended.why or (_KILLED if ended.code == -signal.SIGKILL else ""):
            message += f": {why}"
        crashed = _CRASHED_THREAD.search(traceback)
        traceback = crashed[0] if crashed else traceback
    elif last:
        kind, message = "exception", next((line for line in reversed(last) if line[:1].strip()), last[-1])
    else:
        kind, message = "code", f"exited with code {ended.code}{_reason(ended)}"
    return ended.cause(kind, message, traceback)


def _reason(ended: Ended) -> str:
    """Return what `sys.exit("reason")`, argparse and others write to stderr before they exit."""
    line = ended.last_line
    return f"; its last line on stderr: {line[:_LONGEST_LINE]}" if line else ""


def judge(
    marks: Sequence[Cause],
    ended: Mapping[int, Ended],
    outside: Sequence[Cause] = (),
    mpiexec: int | None = None,
) -> Verdict | None:
    """Find the first failure.

    Args:
        marks: causes in marked lines of ranks.
        ended: how ranks ended, by rank; those still running are missing.
        outside: failures of mpiexec, agents or the launcher.
        mpiexec: its exit code, if it has ended: used where no rank's own is known.

    Returns:
        None if nothing failed.
    """
    found: dict[int, Cause] = {}
    for mark in sorted(marks, key=lambda mark: (mark.follows, mark.time)):
        if mark.rank is not None:
            found.setdefault(mark.rank, mark)
    for rank, end in ended.items():
        own = None if end.by_launcher else of_end(end)
        if own and rank not in found:
            found[rank] = own
        elif rank in found and not found[rank].traceback and end.last_words:
            found[rank] = replace(found[rank], traceback=end.last_words)
        kind = found[rank].kind if rank in found else ""
        if kind in ("code", "exit") and (end.code or 0) > 0 and not end.by_mpiexec:
            waited = " while other ranks waited for it" if kind == "exit" else ""
            found[rank] = replace(found[rank], message=f"exited with code {end.code}{waited}{_reason(end)}")
    if not found and all(cause.kind == "daemon" for cause in outside):  # after ranks that all ended well
        return None
    candidates = [*found.values(), *outside, *_early(found, ended)]
    first = min(candidates, key=lambda cause: (_weight(cause), cause.time))
    if first.kind == "exception" and first.rank is not None:
        # Of an error that is raised on all ranks, it is chance who reports it first. It is often rank 0's.
        alike = [one for one in found.values() if one.same(first) and one.time - first.time < _LATE_S]
        first = min(alike, key=lambda one: one.rank or 0)
    # Of a rank that the launcher has ended others say that it died, and guess why.
    late = [end for end in ended.values() if end.by_launcher]
    rest = [one for one in found.values() if one is not first and not any(map(one.names, late))]
    others = sorted(rest, key=lambda cause: cause.time)
    if first.kind == "ended":  # no rank ended by itself
        why = "a rank called MPI_Abort or left without MPI_Finalize, or its wrapper process was killed"
        first = replace(first, message=f"{first.message}: {why}")
    return Verdict(first, _code(first, ended, others) or abs(mpiexec or 1), tuple(others))


def _weight(cause: Cause) -> int:
    """Rank causes: less is likelier the first failure; equals go by time."""
    # Ranks that lose mpiexec may be quicker to fail than its end is reported; all wrappers vanish with it.
    of_kind = {"launcher": -1, "vanished": 1, "early": 2, "ended": 3, "peer": 3}
    return of_kind.get(cause.kind, 4 if cause.follows else 0)


def _early(found: Mapping[int, Cause], ended: Mapping[int, Ended]) -> list[Cause]:
    """Return ranks that ended with 0 before others failed, if nothing better explains that failure."""
    if not found:
        return []
    until = min(cause.time for cause in found.values())
    if all(cause.kind in ("ended", "peer") or cause.of_an_end for cause in found.values()):
        until += _LATE_S
    return [
        end.cause("early", f"ended with exit code 0 while other ranks still ran{_reason(end)}")
        for end in ended.values()
        if not end.failed and (end.time <= until or any(cause.names(end) for cause in found.values()))
    ]


def _code(first: Cause, ended: Mapping[int, Ended], others: Sequence[Cause]) -> int:
    """Return the exit code of the first failing rank that has one of its own, or 0."""
    if first.rank is None or first.kind == "early":
        return first.code
    for cause in (first, *others):
        end = ended.get(cause.rank) if cause.rank is not None else None
        if end and end.code != 0 and not end.by_launcher and not end.by_mpiexec:
            return exit_code(end.code)
    return 0


def write_outcome(outcome: Verdict | int, directory: str) -> None:
    """Write how a job ended into its output directory, if that can be: code, time, and the cause or None."""
    cause = asdict(outcome.cause) if isinstance(outcome, Verdict) else None
    code = outcome.code if isinstance(outcome, Verdict) else outcome
    with contextlib.suppress(OSError), open(os.path.join(directory, OUTCOME_FILE), "w") as file:
        json.dump({"code": code, "time": time.time(), "cause": cause}, file)


_WIDTH, _LONG = 78, 300


def render(verdict: Verdict, ranks: int, directory: str = "") -> str:
    """Return the frame that ends a failed job's output; `directory` is where the ranks' log files are."""
    cause = verdict.cause
    lines = [" ringdance: the job failed ".center(_WIDTH, "=")]
    if cause.rank is None:
        lines.append(cause.message)
    else:
        lines.append(
            f"first failure: rank {cause.rank} of {ranks} on {cause.host}, pid {cause.pid}: {cause.message}"
        )
        if cause.traceback:
            traceback = cause.traceback.rstrip()
            if len(cause.message) > _LONG:  # once is enough
                text = cause.message[cause.message.find(": ") + 1 :].strip()  # all of it without ": "
                traceback = traceback.replace(text, "(see above)")
            lines += ["", traceback, ""]
    shown = 4
    for other in verdict.others[:shown]:
        same = "the same error" if other.same(cause) else other.message
        lines.append(f"then rank {other.rank} on {other.host}, pid {other.pid}: {same}")
    if len(verdict.others) > shown:
        lines.append(f"then {len(verdict.others) - shown} more ranks")
    if directory:
        lines.append(f"full output of each rank: {directory}")
    lines.append(f" exit code {verdict.code} ".center(_WIDTH, "="))
    return "\n".join(lines)
