"""Find out why a job failed: distinguish the first failure from the failures that follow from it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ringdance.host.exit_code import CAUSE_MARK
from ringdance.launch.hosts import counted

MARK = CAUSE_MARK.encode()
"""Start of a line that ``parse_mark()`` parses."""

OUTCOME_FILE = "ringdance-outcome.json"
"""File in the output directory of a job that has ended. See ``write_outcome()``."""

# Errors that report the failure of another rank. They are never the first failure if there is any other.
OF_OTHERS = ("RankLostError", "ShutDownError", "StallError", "DeadlockError")
# The traceback of the thread that received the signal, among all threads that faulthandler prints.
_CRASHED_THREAD = re.compile(r"^Current thread .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_LONGEST_LINE = 300
_LOST_PEER = "MPI_ERR_PROC_FAILED"  # raised by mpi4py when a peer has died
# Exit codes of processes that Open MPI ends because a peer has died. The error is MPI_ERR_UNKNOWN ("Socket
# closed") or MPI_ERR_PROC_FAILED.
_LOST_PEER_CODES = (14, 75, 76)
_RECORD = re.compile(r" \(Last batches: \S+\)")
_KILLED = "sent by a user, or by the kernel because memory had run out (see dmesg)"
_LATE_S = 0.5  # tolerance, because peers may notice a rank's exit before its wrapper does


@dataclass(frozen=True)
class Cause:
    """A failure that may be why the job failed.

    Attributes:
        rank: The failed rank, or None if mpiexec, an agent or the launcher failed.
        host: Name of the failed process's machine.
        pid: ID of the failed process.
        time: Time of the failure in seconds since the epoch.
        kind: "exception", "exit" (ended early), "code" (exited with an error code), "peer" (ended by the MPI
            library), "signal", "ended" (by mpiexec), "early" (exited with code 0 while others were running),
            "vanished" (without a report), "launcher", or "daemon" (mpiexec's daemon on another host exited).
            If the cause reports another rank's failure: "lost" or "stall".
        message: Description in one line.
        traceback: Traceback, if there is one.
        code: Exit code for the job, if the kind is "launcher".
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
        """Return True if ``other`` reports the same error."""
        return _RECORD.sub("", self.message) == _RECORD.sub("", other.message)

    @property
    def follows(self) -> bool:
        """True if the cause reports another rank's failure."""
        error = self.message.partition(":")[0].rpartition(".")[2]
        return self.kind in ("lost", "stall") or error in OF_OTHERS or _LOST_PEER in self.message

    @property
    def of_an_end(self) -> bool:
        """True if the cause reports that another rank has exited."""
        return self.follows and ("RankLostError" in self.message or _LOST_PEER in self.message)

    def names(self, ended: Ended) -> bool:
        """Return True if the cause reports that the rank in ``ended`` has exited."""
        who = f"rank {ended.rank} on host {ended.host} (pid {ended.pid})"  # like str(transport.base.Identity)
        return self.of_an_end and who in self.message.partition(" died while ")[0]


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        rank, host, pid: Identity of the rank.
        code: Exit code, the negative signal number, or None if the wrapper vanished without a report.
        time: Time of the end in seconds since the epoch.
        last_words: Last traceback that the rank wrote to stderr, if any.
        last_line: Last line that the rank wrote to stderr, if any.
        by_launcher: True if the rank exited after the launcher had started to end the job.
        by_mpiexec: True if the rank exited after mpiexec had ended its wrapper.
        why: Explanation found on the host for the signal that ended the rank, if any.
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
        """True unless the rank completed. A rank whose wrapper mpiexec has killed always counts as failed."""
        return self.code != 0 or self.by_mpiexec

    def cause(self, kind: str, message: str, traceback: str = "") -> Cause:
        """Build the cause that reports this end. See ``Cause`` for the arguments."""
        return Cause(self.rank, self.host, self.pid, self.time, kind, message, traceback)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a failed job: the cause, the exit code (never 0), and the failures that followed."""

    cause: Cause
    code: int
    others: tuple[Cause, ...]

    @property
    def follows(self) -> bool:
        """True if the cause follows from another failure, which may still be reported."""
        return self.cause.kind in ("ended", "peer", "early") or self.cause.of_an_end


def parse_mark(line: bytes) -> Cause | None:
    """Parse the cause in a marked line. Returns None if the line is ordinary text."""
    try:
        return Cause(**json.loads(line.partition(MARK)[2]))
    except (ValueError, TypeError):
        return None


def signal_name(number: int) -> str:
    """Return a signal's name, such as ``SIGKILL``, or ``signal N`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def of_end(ended: Ended) -> Cause | None:
    """Return the failure that a rank's end indicates, or None if the rank completed."""
    if not ended.failed:
        return None
    last, traceback = ended.last_words.splitlines(), ended.last_words
    if ended.code is None:
        text = ended.why or "the rank and its wrapper process disappeared without a report. Were they killed?"
        kind, message = "vanished", text
    elif ended.by_mpiexec:
        kind, message = "ended", "ended by mpiexec"
    elif ended.code in _LOST_PEER_CODES and not last:
        kind, message = "peer", f"exited with code {ended.code}, which Open MPI uses after a peer has exited"
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
    """Quote the last line on stderr, where ``sys.exit("reason")``, argparse and others write the reason."""
    line = ended.last_line
    return f"; its last line on stderr: {line[:_LONGEST_LINE]}" if line else ""


def judge(
    marks: Sequence[Cause], ended: Mapping[int, Ended], outside: Sequence[Cause] = (),
    mpiexec: int | None = None,
) -> Verdict | None:
    """Find the first failure.

    Args:
        marks: Causes parsed from marked lines in the ranks' output.
        ended: How ranks ended, by rank. Does not contain ranks that are still running.
        outside: Failures of mpiexec, agents or the launcher.
        mpiexec: Exit code of mpiexec if it has exited. Used if no rank failed with its own exit code.

    Returns:
        The verdict, or None if nothing failed.
    """
    causes: dict[int, Cause] = {}
    for mark in sorted(marks, key=lambda mark: (mark.follows, mark.time)):
        if mark.rank is not None:
            causes.setdefault(mark.rank, mark)
    for rank, end in ended.items():
        own = None if end.by_launcher else of_end(end)
        if own and rank not in causes:
            causes[rank] = own
        elif rank in causes and not causes[rank].traceback and end.last_words:
            causes[rank] = replace(causes[rank], traceback=end.last_words)
        kind = causes[rank].kind if rank in causes else ""
        if kind in ("code", "exit") and (end.code or 0) > 0 and not end.by_mpiexec:
            waited = " while other ranks waited for it" if kind == "exit" else ""
            causes[rank] = replace(causes[rank], message=f"exited with code {end.code}{waited}{_reason(end)}")
    if not causes and all(cause.kind == "daemon" for cause in outside):  # daemons exited after all ranks
        return None
    candidates = [*causes.values(), *outside, *_early(causes, ended)]
    first = min(candidates, key=lambda cause: (_weight(cause), cause.time))
    if first.kind == "exception" and first.rank is not None:
        # If several ranks raise the same error, any of them may report it first. Prefer the lowest rank.
        alike = [own for own in causes.values() if own.same(first) and own.time - first.time < _LATE_S]
        first = min(alike, key=lambda cause: cause.rank or 0)
    # If the launcher ended a rank, ignore other ranks' reports of its death, which only guess the reason.
    late = [end for end in ended.values() if end.by_launcher]
    rest = [cause for cause in causes.values() if cause is not first and not any(map(cause.names, late))]
    others = sorted(rest, key=lambda cause: cause.time)
    if first.kind == "ended":  # no rank exited on its own
        why = "a rank called MPI_Abort or exited without MPI_Finalize, or its wrapper process was killed"
        first = replace(first, message=f"{first.message}: {why}")
    return Verdict(first, _code(first, ended, others) or abs(mpiexec or 1), tuple(others))


def _weight(cause: Cause) -> int:
    """Return a sort key. The cause with the lowest key is most likely the first failure. Time breaks ties."""
    # If mpiexec dies, ranks may fail before its end is reported, and all wrappers vanish with it.
    of_kind = {"launcher": -1, "vanished": 1, "early": 2, "ended": 3, "peer": 3}
    return of_kind.get(cause.kind, 4 if cause.follows else 0)


def _early(found: Mapping[int, Cause], ended: Mapping[int, Ended]) -> list[Cause]:
    """Return causes for ranks that exited with code 0 and may thereby have made other ranks fail."""
    if not found:
        return []
    until = min(cause.time for cause in found.values())
    if all(cause.kind in ("ended", "peer") or cause.of_an_end for cause in found.values()):
        until += _LATE_S
    return [
        end.cause("early", f"exited with code 0 while other ranks were still running{_reason(end)}")
        for end in ended.values()
        if not end.failed and (end.time <= until or any(cause.names(end) for cause in found.values()))
    ]


def _code(first: Cause, ended: Mapping[int, Ended], others: Sequence[Cause]) -> int:
    """Return the exit code of the first failed rank that neither the launcher nor mpiexec ended, or 0.

    As in a shell, the exit code of a process killed by a signal is 128 + the signal's number.
    """
    if first.rank is None or first.kind == "early":
        return first.code
    for cause in (first, *others):
        end = ended.get(cause.rank) if cause.rank is not None else None
        if end and end.code != 0 and not end.by_launcher and not end.by_mpiexec:
            code = -signal.SIGKILL if end.code is None else end.code  # a vanished process was probably killed
            return code if code >= 0 else 128 - code
    return 0


def write_outcome(outcome: Verdict | int, directory: str) -> None:
    """Write a job's outcome to its output directory: exit code, time, and the cause or None. Never raises."""
    cause = asdict(outcome.cause) if isinstance(outcome, Verdict) else None
    code = outcome.code if isinstance(outcome, Verdict) else outcome
    with contextlib.suppress(OSError), open(os.path.join(directory, OUTCOME_FILE), "w") as file:
        json.dump({"code": code, "time": time.time(), "cause": cause}, file)


_WIDTH, _LONG = 78, 300


def render(verdict: Verdict, ranks: int, directory: str = "") -> str:
    """Render the summary that ends a failed job's output. ``directory`` contains the ranks' output files."""
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
            if len(cause.message) > _LONG:  # too long, so show it only once
                # If the message contains no ": ", this is the entire message.
                text = cause.message[cause.message.find(": ") + 1 :].strip()
                traceback = traceback.replace(text, "(see above)")
            lines += ["", traceback, ""]
    shown = 4
    for other in verdict.others[:shown]:
        same = "the same error" if other.same(cause) else other.message
        lines.append(f"then rank {other.rank} on {other.host}, pid {other.pid}: {same}")
    if (more := len(verdict.others) - shown) > 0:
        lines.append(f"then {counted(more, 'more rank')}")
    if directory:
        lines.append(f"full output of each rank: {directory}")
    lines.append(f" exit code {verdict.code} ".center(_WIDTH, "="))
    return "\n".join(lines)
