"""Handle the end of a rank's program: success, an uncaught exception, or a nonzero exit code."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringdance.core.engine import Engine
from ringdance.core.reports import dump
from ringdance.core.transport.base import Transport
from ringdance.errors import UNEVEN_STEPS, RankLostError
from ringdance.host import exit_code
from ringdance.training.rank_monitor import RankMonitor

if TYPE_CHECKING:
    from ringdance.training.tuning.autotune import Autotuner

_log = logging.getLogger("ringdance")

# Time in seconds for the other ranks to receive the message and raise their own errors. Once this process
# exits, the MPI launcher kills them.
_GRACE = 0.5
_DEVICES_S = 120.0  # for the work that a GPU has queued when the script ends

# JAX adds the prefix "Error dispatching computation: " once for each program that an error passes through.
_REPEATED = re.compile(r"(\S[^:\n]*: )\1+")


class Process:
    """State of this process: its engine, and how its program ends."""

    engine: Engine | None = None
    comm: Any = None  # the arguments of the last init()
    transport: tuple[int, Callable[..., Transport]] | None = None
    pid: int = 0  # this process's pid, or 0 before the first init()
    mpi: bool = False
    monitor = RankMonitor()
    clean: bool = True  # True while every engine so far has stopped by agreement
    at_init: tuple[Callable[[], None], ...] = ()
    tuner: Autotuner | None = None
    failed: bool = False  # True if the program is ending with an uncaught exception or a nonzero exit code
    unseen: tuple[Engine | None, Exception] | None = None  # see ``session.note_unseen``
    # Function that returns True if this rank has trained. None if no warning is needed, because this is
    # unknown or was already reported, or because the rank has reduced something.
    has_trained: Callable[[], bool] | None = None

    def watch(self) -> None:
        """Install the hooks that run when the program ends, fails or forks."""
        dump.enable()
        exit_code.watch(self._on_code)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        previous = sys.excepthook
        sys.excepthook = lambda kind, error, trace: self._on_exception(previous, kind, error, trace)

    def _on_exception(
        self, previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an uncaught exception to the launcher and the peers as the cause of the failure."""
        engine = self.engine
        previous(kind, error, trace)
        self.failed = True
        if engine is not None and self.pid == os.getpid():
            text = _REPEATED.sub(r"\1", f"{kind.__name__}: {error}")
            how = "lost" if engine.end.broken is not None or engine.closed else "exception"
            traced = "".join(traceback.format_exception(kind, error, trace))
            _fail(engine, how, text, f"ended with {text}", traced)

    def _on_code(self) -> None:
        """Report a failure if the exit code is not 0, before Python waits for threads."""
        if exit_code.exit_code():
            self._note_failure()

    def await_devices(self, engine: Engine) -> None:
        """Wait for exchanges on devices. If one has failed, the script has received wrong results."""
        try:
            engine.await_devices(_DEVICES_S)
            error: Exception | None = engine.end.error() if engine.end.lost_results else None
        except RankLostError as late:
            error = late
        if error is not None:
            error.add_note("ringdance: this happened after the script had received wrong results.")
            self.unseen = engine, error

    def _note_failure(self) -> None:
        """Report (once) this rank's failure: an error that was never raised, or a nonzero exit code."""
        if self.unseen is not None and self.pid == os.getpid() and not self.failed:
            self.engine, error = self.unseen
            if not hasattr(error, "__notes__"):
                error.add_note("ringdance: this happened in a compiled program whose results were not read.")
            sys.excepthook(type(error), error.with_traceback(None), None)
        code = 0 if self.failed or self.pid != os.getpid() else exit_code.exit_code()
        if code:
            self.failed = True
            if (engine := self.engine) is not None:
                how = "lost" if engine.end.broken is not None or engine.end.unclean else "code"
                _fail(engine, how, f"exited with code {code}", f"ended with exit code {code}")

    def _at_exit(self) -> None:
        if self.engine is not None and self.pid == os.getpid():
            self.await_devices(self.engine)
        self._note_failure()
        engine, self.engine = self.engine, None
        if self.pid != os.getpid():
            return
        if engine is not None and not self.failed:
            self._end_well(engine)
        if engine is not None:
            self.monitor.end(engine)
        if self.mpi:
            from ringdance.core.transport.library import finalize

            finalize(self.clean and not self.failed)

    def _end_well(self, engine: Engine) -> None:
        """Leave the job together with the other ranks. If one of them waits for this rank, the job fails."""
        done = f" after {engine.recorder.steps_text()}"
        self.clean &= engine.shutdown(f"has ended its program{done}", departing=True)
        _warn_of_incomplete(engine)
        if engine.end.unclean and engine.end.stopped_first:
            ended = f"{engine.identity} ended its program{done}, while other ranks waited for it."
            _cause(engine, "exit", f"{ended} {UNEVEN_STEPS}")
            self.clean = False
            time.sleep(_GRACE)
        self.clean &= not engine.end.unclean
        self.show_summary(engine)

    def show_summary(self, engine: Engine) -> None:
        """Show the summary of a successful run, on rank 0."""
        if engine.rank or not self.clean:
            return
        if self.tuner is not None:
            self.tuner.leave()
        with contextlib.suppress(Exception):  # stderr may be closed
            for line in engine.summary.lines(engine.transport.identities):
                print(f"ringdance: {line}", file=sys.stderr)
            if engine.size > 1 and self.has_trained and self.has_trained():
                self.has_trained = None
                _log.warning(
                    "ringdance: rank 0 has run backward passes, but this job of %d ranks ran no allreduce, "
                    "so no gradients were averaged. To train one model on all ranks, wrap its optimizer: "
                    "optimizer = hvd.DistributedOptimizer(optimizer, ...). Ignore this warning if each rank "
                    "trains its own model, only rank 0 trains, or other code averages the gradients.",
                    engine.size,
                )  # fmt: skip

    def _after_fork(self) -> None:
        """Keep rank and size in a forked child (such as a DataLoader worker), but refuse collectives."""
        self.monitor = RankMonitor()
        if self.engine is not None:
            self.engine.disown()


def _fail(engine: Engine, kind: str, message: str, ended: str, trace: str = "") -> None:
    """Report this rank's failure to the launcher, and stop the job on the other ranks."""
    if engine.size == 1:
        return
    _cause(engine, kind, message, trace)
    if not engine.closed:
        engine.leave(f"{engine.identity} {ended}")
    if engine.end.failed_here:
        time.sleep(_GRACE)


def _cause(engine: Engine, kind: str, message: str, trace: str = "") -> None:
    """Report the cause to Ringdance's launcher. Without a launcher, log what Python has not printed."""
    who = engine.identity
    if "RINGDANCE_JOB" not in os.environ:
        if kind in ("exit", "code"):
            _log.error("ringdance: %s", message if kind == "exit" else f"{who} {message}.")
        return
    cause = {"rank": who.rank, "host": who.host, "pid": who.pid, "time": time.time()}
    line = json.dumps(cause | {"kind": kind, "message": message, "traceback": trace})
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{exit_code.CAUSE_MARK} {line}\n")
        sys.stderr.flush()


def _warn_of_incomplete(engine: Engine) -> None:
    """Warn about asynchronous operations that were never waited for. Their results are lost."""
    names = engine.end.incomplete
    if names and not engine.end.unclean:  # After an unclean end, the rank that waits gets an error.
        shown = ", ".join(f"'{name}'" for name in names[:6])
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        _log.warning(
            "ringdance: %s ended its program with incomplete operations: %s%s. Call synchronize() with each "
            "handle. An operation that another rank never submits cannot complete.",
            engine.identity, shown, more,
        )  # fmt: skip
