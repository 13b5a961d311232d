"""A running job: an event loop that handles agents and signals, with explicit states."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections.abc import Mapping
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.system.signals import PASSED_ON, STOPPING, Signals
from ringdance.launch.agents import Agents, Handlers, RankLink
from ringdance.launch.cause import Cause, Ended, Verdict, signal_name
from ringdance.launch.hosts import Host, counted, ranks_text
from ringdance.launch.job_messages import Place, job_messages
from ringdance.launch.mpiexec import Mpiexec
from ringdance.launch.output.results import OutputDirectory, Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.prepare import PreparedJob
from ringdance.launch.rank_table import Rank, RankTable
from ringdance.launch.remote.connect import Remote, folded, together
from ringdance.launch.shutdown import Shutdown
from ringdance.launch.states import CLEANING, ENDING, LIMITS, WELL, Event, Stage, State

# The constants down to _TERM_S are the times, in seconds, from an event to the deadline of the next state.
_FAILED_S = 0.1
_MPIEXEC_EXITED_S = 0.3  # the ranks' reports may still be unread in the sockets
# How long to wait after a rank fails before the other ranks are stopped. This gives them time to report what
# they saw, and the launcher time to receive the signal that ended the rank, which may arrive a little later.
_RANK_FAILED_S = 1.0
_RANK_KILLED_S = 0.5  # the same for a killed rank, which cannot have reported why it ended
_OVER_S = 3.0  # how long to wait for mpiexec to exit after all ranks have; it sometimes hangs
_OVER_LATE_S = 0.05  # the same if a rank has failed, the job was stopped, or mpiexec has already exited
_STOP_S = 0.8  # time from a signal until the user is told how much time the ranks have left
_TERM_S = 0.2  # time from SIGTERM after a failure until the ranks are killed

_OWN_FAILURE_S = 1.0  # time for a rank that reported a failure to exit; the job adopts its exit code
_CAUSE_S = 1.0  # time for another host to report the failure that caused the known failures
_AGAIN_S = 0.05  # interval at which the launcher checks whether it must still wait for a host


class RunningJob:
    """Takes a job through its states (states.py), from the agents' preparation to their cleanup.

    Args:
        prepared: The job's plan and the agents on other hosts, which end with the job.
        place: The job's ID and directory.
        local: The agent on this host, which ends with the job.
        screen: Destination of the ranks' output.
        signals: Signals received by the launcher.
        output: Receives files from other hosts.
        results: Receives the ranks' results if all complete, or None if not needed.
    """

    def __init__(
        self, prepared: PreparedJob, place: Place, local: Remote, screen: Screen, signals: Signals,
        output: OutputDirectory, results: Results | None,
    ) -> None:  # fmt: skip
        self._prepared, self._plan, self._spec = prepared, prepared.plan, prepared.spec
        self._place, self._screen = place, screen
        self._signals, self._output, self._results = signals, output, results
        self._selector = selectors.DefaultSelector()
        if signals.wakes:
            self._selector.register(signals.wakes, selectors.EVENT_READ, self._on_signals)
        handlers = Handlers(
            on_ready=self._on_ready, on_note=self._note, on_output=self._on_output, on_file=self._on_file,
            on_rank_message=self._on_rank_message, on_rank_closed=self._on_rank_closed,
            on_rank_output=lambda link, which, data: self._ranks.write(link, which, data),
            on_host_failed=self._on_host_failed, on_silence=self._on_silence,
            on_clean=self._on_clean, on_local_lost=self._on_local_lost,
        )  # fmt: skip
        timeout = self._spec.heartbeat_timeout
        self._agents = Agents(local, prepared.remotes, self._selector, handlers, timeout)
        self._ranks = RankTable(prepared, screen, self._agents)
        exits = self._on_mpiexec_exit, self._on_daemon_exit
        self._mpiexec = Mpiexec(self._plan, place, self._agents, screen.of(1), *exits)
        self._stage = Stage(self._spec.start_timeout)
        self._shutdown = Shutdown(self._spec.grace)
        self._own_failure_awaited = False
        self._cause_awaited_until = math.inf
        self._outside: list[Cause] = []  # failures that did not occur in a rank

    def run(self, files: Mapping[str, bytes]) -> Verdict | int:
        """Run the job to completion, with ``files`` in its directory on every host. See ``Job.run()``."""
        messages = job_messages(self._plan, self._place, self._prepared.needed, self._spec.output_directory)
        self._agents.begin(*messages, files)
        while self._stage.state is not State.DONE:
            self._step()
        return self._result()

    def close(self) -> list[int]:
        """Close all connections. Returns the process IDs of this host's ranks."""
        self._agents.close()
        self._selector.close()
        return self._ranks.local_pids()

    # --- the loop ------------------------------------------------------------------------------

    def _step(self) -> None:
        # Once the job leaves the RUNNING state, tracebacks are held back until it ends.
        due = self._ranks.show_due() if self._stage.state is State.RUNNING else math.inf
        due = min(due, self._stage.deadline)
        again = self._agents.check(self._stage.state not in WELL and not self._shutdown.signal)
        timeout = min(max(0.0, due - time.monotonic()), math.inf if again is None else again)
        for key, _ in self._selector.select(None if math.isinf(timeout) else timeout):
            # Handling an earlier event from the same select() may have closed this file.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        if self._stage.deadline <= time.monotonic():
            self._expire()

    def _handle(self, event: Event, seconds: float = math.inf) -> None:
        """Apply an event to the state table (``Stage.follow()``), and perform the actions for a new state."""
        if not self._stage.follow(event, seconds):
            return
        state = self._stage.state
        self._mpiexec.output.quiet = state in ENDING
        if state is State.STOPPING:
            self._ranks.send(self._shutdown.sigterm())
            if self._ranks.idle:
                self._stage.deadline = time.monotonic()
        elif state is State.CLEANING_REMOTE:  # before this host, because the others report to it
            self._agents.clean_remotes(not self._ranks.completed)
        elif state is State.CLEANING_LOCAL:
            self._agents.give_up_remotes()
            if self._results and self._results_wanted:
                self._results.keep(self._place.directory)
            self._agents.clean_local(not self._ranks.completed)

    def _expire(self) -> None:
        """Handle a deadline that has passed: extend it, or take action."""
        extension = self._extension()
        self._stage.deadline = time.monotonic() + extension if extension > 0 else math.inf
        if extension > 0:
            return
        if self._stage.state in (State.PREPARING, State.STARTING):
            text = f"only {self._ranks.connected} of {counted(self._plan.ranks, 'rank')} started within "
            text += f"{self._spec.start_timeout:g} s (--start-timeout)"
            self._fail("\n  ".join([text, *folded(self._ranks.not_started())]))
        elif self._stage.state is State.CLEANING_LOCAL:
            self._agents.kill_local()
        else:
            number = self._shutdown.signal
            if self._stage.state is State.STOPPING and number and (late := self._ranks.running):
                seconds = f"{time.monotonic() - self._shutdown.came:.1f} s after {signal_name(number)}"
                self._screen.show(f"killing {ranks_text(late)}, still running {seconds}")
            self._handle(Event.TIMEOUT, _TERM_S)

    def _extension(self) -> float:
        """Return by how many seconds to extend the state's deadline. 0 or less means no extension."""
        state = self._stage.state
        if state in (State.CLEANING_REMOTE, State.CLEANING_LOCAL):
            # Agents may still be sending results and output, which may be large.
            return LIMITS[state] + self._agents.heard - time.monotonic()
        if state is State.STOPPING and (left := self._grace_left()) > 0:
            return left
        if state is State.FAILED and not self._own_failure_awaited and self._ranks.own_failure_reported():
            self._own_failure_awaited = True
            return _OWN_FAILURE_S
        waits = state in (State.FAILED, State.ENDED, State.STOPPING) and self._cause_may_follow()
        return _AGAIN_S if waits else 0.0

    def _cause_may_follow(self) -> bool:
        """Return True if another host may still report why ranks have failed."""
        known = self._ranks.completed or self._outside or self._shutdown.signal
        if known or not self._plan.multi_host:
            return False
        if self._agents.pending:  # a silent host may be lost, which may be the cause
            return True
        verdict, _ = self._ranks.judge((), None)
        if verdict is None or not verdict.follows:
            return False
        self._cause_awaited_until = min(self._cause_awaited_until, time.monotonic() + _CAUSE_S)
        return time.monotonic() < self._cause_awaited_until

    def _grace_left(self) -> float:
        """Return the seconds left for ranks to exit after a signal, and show the time limit to the user."""
        left = self._shutdown.kill_at - time.monotonic()
        if left <= 0 or self._ranks.idle:
            return 0.0
        # Background jobs have a grace period of at least an hour. `ringdance stop` enforces the actual limit.
        limit = "time" if self._spec.grace >= 3600 else f"{self._spec.grace:g} s"
        name = signal_name(self._shutdown.signal)
        self._screen.show(f"{name}: the ranks have {limit} to exit. Press Ctrl-C (SIGINT) to kill them now")
        return left

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number in PASSED_ON:
                self._ranks.send({"signal": number})
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        """End the job after a signal to the launcher."""
        # A signal sent to all processes may end ranks slightly before it reaches the launcher.
        caused = not self._outside and self._ranks.signals_ended_failed
        if not self._shutdown.signal and self._stage.state is State.FAILED and caused:
            self._stage.deadline = math.inf
        self._shutdown.add(number, self._stage.deadline, caused)
        self._handle(Event.STOP, max(0.0, min(_STOP_S, self._shutdown.kill_at - time.monotonic())))

    # --- ranks ---------------------------------------------------------------------------------

    def _on_rank_message(self, link: RankLink, message: dict[str, Any]) -> None:
        rank = self._ranks.of(link)
        if "rsh" in message:
            if not self._mpiexec.start_daemon(link, message["rsh"], message["command"]):
                host = f"{message['rsh']}, which is not a host in this job"
                self._fail(f"mpiexec tried to start a process on {host}")
        elif "rank" in message:
            wrong = self._ranks.add(link, message)
            if wrong:
                self._fail(f"{self._plan.mpi.mpiexec} {wrong}")
        elif rank and "pid" in message:
            self._ranks.on_start(rank, message["pid"])
            link.remote.time_here(message["time"])
            self._note(f"rank {rank.rank} runs on {rank.host}, pid {rank.pid}")
            # This rank was not running yet when the other ranks received SIGTERM.
            if self._stage.state is State.STOPPING:
                link.send(self._shutdown.sigterm())
            if self._ranks.started:
                self._handle(Event.STARTED)
        elif rank and "stopped" in message:
            who = f"rank {rank.rank} on {rank.host} (pid {rank.pid})"
            hint = f"the other ranks are waiting for it. Resume it with `kill -CONT {rank.pid}` on that host"
            self._screen.show(f"{who} was stopped by {signal_name(message['stopped'])}: {hint}")
        elif rank and "ended" in message:
            when = link.remote.time_here(message["time"])
            self._on_rank_exit(rank, message["ended"], when, message["by_mpiexec"], message["why"])

    def _on_rank_closed(self, link: RankLink) -> None:
        rank = self._ranks.of(link)
        if rank and not rank.ended:
            self._on_rank_exit(rank, None, time.time())

    def _on_rank_exit(
        self, rank: Rank, code: int | None, when: float, by_mpiexec: bool = False, why: str = ""
    ) -> None:
        by_launcher = self._stage.state in ENDING
        ended = Ended(rank.rank, rank.host, rank.pid, code, when, "", by_launcher, by_mpiexec, why=why)
        self._ranks.on_end(rank, ended)
        self._note(f"rank {rank.rank} ended: {code}")
        if ended.failed:
            killed = code is None or (code < 0 and -code not in STOPPING)
            self._handle(Event.FAILURE, _RANK_KILLED_S if killed else _RANK_FAILED_S)
        if self._ranks.over or (self._stage.state is State.STOPPING and self._ranks.idle):
            self._ranks.send({"over": True})
            late = self._ranks.failed or by_launcher or self._mpiexec.code is not None
            self._handle(Event.OVER, _OVER_LATE_S if late else _OVER_S)

    # --- mpiexec and hosts ---------------------------------------------------------------------

    def _on_ready(self) -> None:
        """Start mpiexec once all agents are ready, unless any has reported a problem."""
        if self._agents.problems:
            raise LaunchError(together(self._agents.problems))
        if self._stage.state is State.PREPARING:
            self._mpiexec.start()
            self._handle(Event.READY)

    def _on_output(self, data: bytes) -> None:
        """Process output from mpiexec or one of its daemons."""
        self._mpiexec.output.feed(data)
        if self._spec.verbose:
            self._screen.of(1)(data)

    def _on_mpiexec_exit(self, pid: int, code: int) -> None:
        self._note(f"mpiexec (pid {pid}) ended: {code}")
        starting = self._stage.state is State.STARTING and not self._outside and not self._ranks.connected
        if starting and code > 0 and self._mpiexec.retry():
            self._screen.show("mpiexec could not start its daemons; retrying once")
            return
        if code < 0 and self._stage.state not in ENDING:
            name = signal_name(-code)
            self._fail(f"mpiexec (pid {pid}) was killed by {name} (signal {-code})", 128 - code)
        if self._ranks.over:
            self._handle(Event.OVER, 0.0)
        else:
            self._handle(Event.FAILURE, _MPIEXEC_EXITED_S)

    def _on_daemon_exit(self, host: Host, code: int, when: float) -> None:
        # Open MPI's daemon exits only after its ranks have exited, or because of an earlier failure.
        running = self._ranks.connected and not self._ranks.completed and self._stage.state not in ENDING
        if code and running and self._plan.mpi.family == "openmpi":
            before = self._ranks.ended_by_mpiexec(host.ranks)  # when this daemon ended its ranks
            why = f"mpiexec's daemon (prted) exited with code {code} while ranks were running. Was it killed?"
            self._fail(f"{self._plan.named(host.name)}: {why}", 1, "daemon", min([when, *before]))

    def _on_host_failed(self, host: str, message: str, lost: bool) -> None:
        """Handle the loss of a host, or the death of a program other than a rank on that host."""
        self._ranks.lost_hosts |= {host} if lost else set()
        self._note(f"host {host}: {message}")
        text = f"{self._plan.named(host)}: {message}"
        if self._stage.state in CLEANING:
            if lost and self._results_wanted:
                self._fail(f"{text}, before all results of its ranks had arrived")
            if lost and self._agents.remotes_gone:
                self._on_clean(local=False)
        elif self._stage.state is not State.STOPPING or lost:
            self._fail(text)

    def _on_silence(self, host: str, text: str) -> None:
        self._screen.show(f"{self._plan.named(host)}: {text}")

    def _note(self, text: str) -> None:
        """Show a detail if the user asked for --verbose."""
        if self._spec.verbose:
            self._screen.show(text)

    def _fail(self, message: str, code: int = 1, kind: str = "launcher", when: float = 0.0) -> None:
        """Record a failure that did not occur in a rank."""
        at = when or time.time()
        self._outside.append(Cause(None, os.uname().nodename, os.getpid(), at, kind, message, code=code or 1))
        self._handle(Event.FAILURE, _FAILED_S)

    # --- ending the job ------------------------------------------------------------------------

    def _on_clean(self, local: bool) -> None:
        """Continue once the agent on this host, or every agent on other hosts, has cleaned up or is lost."""
        if local or self._stage.state is State.CLEANING_REMOTE:
            self._handle(Event.CLEAN)

    def _on_local_lost(self, why: str) -> None:
        if self._stage.state not in CLEANING:
            self._fail(f"the job's agent on this host was killed ({why})", 128 + signal.SIGKILL)
        self._agents.give_up_remotes()
        self._handle(Event.LOST)

    def _on_file(self, name: str, data: bytes, last: bool) -> None:
        """Store part of a file that a rank wrote to the job's directory on another host.

        ``last`` is True for the file's last part.
        """
        if self._output.take(name, data) or not self._results or not self._results_wanted:
            return
        try:
            self._results.take(self._place.directory, name, data, last)
        except LaunchError as error:
            self._fail(str(error))

    @property
    def _results_wanted(self) -> bool:
        well = self._ranks.completed and not self._outside and not self._shutdown.signal
        return well and self._results is not None

    def _result(self) -> Verdict | int:
        """Show the remaining output and determine the job's result. All processes have exited."""
        self._ranks.end_streams()
        self._screen.freeze()
        banner, code = self._mpiexec.output, self._mpiexec.code
        banner.end()
        verdict, completed = self._ranks.judge(self._outside, code)
        number, incomplete = self._shutdown.signal, completed < self._plan.ranks
        if verdict is None and incomplete and not (number and self._shutdown.caused_failures):
            output = b"".join(banner.unshown).decode(errors="replace").strip()
            text = f"mpiexec exited with code {code}, but only {completed} of "
            text += f"{counted(self._plan.ranks, 'rank')} reported an exit"
            self._fail(text + (f". Output of mpiexec:\n{output}" if output else ""), abs(code or 1))
            verdict, _ = self._ranks.judge(self._outside, code)
        self._ranks.show_held(verdict)
        unfinished = self._results is not None and not self._results.kept
        if number and (verdict or incomplete or unfinished) and self._shutdown.caused_failures:
            for cause in self._outside:
                self._screen.show(cause.message)
            self._screen.show(self._shutdown.sentence())
            return 128 + number
        if len(self._ranks.alone) == self._plan.ranks > 1:
            framework = next(iter(self._ranks.alone.values()))
            self._screen.show(
                f"no rank called hvd.init(): {self._plan.ranks} programs used {framework} without "
                "exchanging anything through Ringdance. That is fine if they divide the work by RANK or "
                "communicate in another way. To train one model together, import one of ringdance.torch, "
                ".tensorflow, .keras or .jax as hvd (see README.md)"
            )
        return verdict or 0
