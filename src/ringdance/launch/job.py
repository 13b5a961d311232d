"""Run a job from the launcher: one event loop over agents and signals, with explicit states."""

from __future__ import annotations

import fcntl
import math
import os
import selectors
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.directories import (
    OUTPUT,
    OWN_DIRECTORY,
    TIMELINE,
    bases,
    host_directory,
    host_shared,
    usable,
)
from ringdance.host.system.cleanup import Cleanup
from ringdance.host.system.signals import PASSED_ON, STOPPING, Signals
from ringdance.launch.agents import Agents, RankLink
from ringdance.launch.cause import Cause, Ended, Verdict, signal_name, write_outcome
from ringdance.launch.hosts import Host, spans
from ringdance.launch.job_messages import job_messages, local_environment, rsh_script
from ringdance.launch.mpi.options import MACHINE_FILE, RSH_SHIM, machine_file
from ringdance.launch.output.results import CollectedFile, Results
from ringdance.launch.output.screen import Screen
from ringdance.launch.output.stream import MpiexecOutput, remove_left
from ringdance.launch.prepare import PreparedJob
from ringdance.launch.rank_table import Rank, RankTable
from ringdance.launch.remote.connect import Remote, close_all, folded, start_local, together
from ringdance.launch.shutdown import Shutdown
from ringdance.launch.states import CLEANING, ENDING, LIMITS, TRANSITIONS, WELL, Event, State

# After the first failure, other ranks get this long to report what they see. Granted again if a running
# rank has reported its own failure, because its exit code becomes the job's. Also applies if SIGTERM, SIGINT
# or SIGHUP ended the first rank, because the launcher may receive the same signal a little later.
_SEE_S = 1.0
_SEE_KILLED_S = 0.5  # instead, if another signal ended it or it vanished: it cannot have reported anything
_CAUSE_S = 1.0  # for another host to report the failure that the known failures follow from
_TERM_S = 0.2  # from SIGTERM after a failure until the ranks are killed
_QUIET_S = 0.8  # from a signal to the launcher until it says how long it waits for the ranks
_EXIT_S = 3.0  # for mpiexec to exit after its ranks have completed; it sometimes hangs


class Job:
    """Run a prepared job once.

    Args:
        prepared: What to start, and the agents on other hosts, which end with the job.
        screen: Destination of the ranks' output.
        id: The job's ID, 32 hexadecimal digits. A new one by default.
        stdin: File descriptor of rank 0's input, if it runs on this host; -1 for none.
        files: Contents, by name, of files for the ranks in the job's directory on every host (call.py).
        results: Receives the ranks' ``result.*.pkl`` from there if all complete. None if not needed.

    Raises (also from ``run()``):
        LaunchError: The job could not be started at all, or the output directory cannot be created.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        screen: Screen,
        *,
        id: str = "",
        stdin: int = -1,
        files: Mapping[str, bytes] | None = None,
        results: Results | None = None,
    ) -> None:
        directory, self._lock = prepared.spec.output_directory, -1
        try:
            if directory:
                os.makedirs(directory, exist_ok=True)
                self._lock = _locked(directory)
                remove_left(Path(directory))
        except OSError as error:
            raise LaunchError(f"--output-filename {directory}: {error.strerror}") from None
        self._prepared, self._screen, self._err = prepared, screen, screen.of(1)
        self._spec, self._plan, self._remotes = prepared.spec, prepared.plan, prepared.remotes
        self.id = id or uuid.uuid4().hex
        self._stdin, self._files, self._results = stdin, files or {}, results
        self._collected: dict[str, CollectedFile] = {}
        self._began = time.time()
        self._state, self._deadline = State.PREPARING, math.inf
        self._selector = selectors.DefaultSelector()
        self._signals = Signals()
        self._banner = MpiexecOutput(self._err)
        self._outside: list[Cause] = []  # failures outside the ranks
        self._mpiexec_code: int | None = None
        self._shutdown = Shutdown(prepared.spec.grace)
        self._cause_until = 0.0
        self._rsh_used = self._retried = self._waited = False
        self._bases: list[str] = []
        self._directory, self._shared = "", host_shared(self.id)

    # --- start ---------------------------------------------------------------------------------

    def run(self) -> Verdict | int:
        """Run to the end. Return 0, 128 + the signal that stopped the launcher, or why the job failed."""
        self._bases, wrong = usable(bases(os.environ))
        local: Remote | None = None
        try:
            if not self._bases:
                raise LaunchError(f"no directory for temporary files ({wrong}). Set TMPDIR to a writable one")
            self._directory = host_directory(self._bases[0], self.id)
            if self._signals.wakes:
                self._selector.register(self._signals.wakes, selectors.EVENT_READ, self._on_signals)
            for note in self._plan.notes:
                self._err(f"ringdance: {note}\n".encode())
            name = next((host.name for host in self._plan.hosts if host.local), "localhost")
            environ = local_environment(self._plan, self.id, self._directory)
            local = start_local(name, environ, self._stdin, self._remotes)
            self._agents = Agents(local, self._remotes, self._selector, self, self._spec.heartbeat_timeout)
            self._ranks = RankTable(self._prepared, self._screen, self._agents)
            output = self._spec.output_directory
            messages = job_messages(self._plan, self.id, self._bases, self._prepared.needed, output)
            self._agents.begin(*messages, self._files)
            self._deadline = time.monotonic() + self._spec.start_timeout
            while self._state is not State.DONE:
                self._step()
            outcome = self._result()
            if output:
                write_outcome(outcome, output)
            return outcome
        finally:
            self._close(local)

    def on_ready(self) -> None:
        """Start mpiexec once all agents are ready, unless any has reported a problem."""
        if self._agents.problems:
            raise LaunchError(together(self._agents.problems))
        if self._state is State.PREPARING:
            if self._plan.multi_host:
                hosts = machine_file(self._plan.hosts, self._plan.mpi.family)
                self._agents.put(_SHIM, rsh_script(self._directory), 0o700)
                self._agents.put(MACHINE_FILE.replace(RSH_SHIM, _SHIM), hosts)
            self._launch()

    def _launch(self) -> None:
        argv = self._plan.argv(self._bases, self.id, os.path.join(self._directory, _SHIM))
        self._agents.spawn(None, self._on_mpiexec_exit, argv=argv, loopback=not self._plan.multi_host)
        self._handle(Event.READY)

    def _on_rsh(self, link: RankLink, name: str, command: str) -> None:
        """Start a command on another host for mpiexec."""
        host = self._plan.host_of(name)
        # mpiexec passes its own settings to its daemons, and they name this host's directory. Daemons that
        # shared one directory would sometimes have the same process ID and so the same files. Each therefore
        # uses its own host's directory.
        command = command.replace(self._directory, OWN_DIRECTORY)
        self._rsh_used = True

        def on_exit(_: int, code: int, when: float) -> None:
            link.send({"code": code})
            if host:
                self._on_daemon_exit(host, code, when)

        if host is None or not self._agents.spawn(host.name, on_exit, command=command):
            self._fail(f"mpiexec wants to start something on {name}, which is not a host of this job")
            link.send({"code": 255})

    # --- the loop ------------------------------------------------------------------------------

    def _step(self) -> None:
        now = time.monotonic()
        due = min(self._deadline, self._ranks.due(self._state is State.RUNNING))
        again = self._agents.check(self._state not in WELL and not self._shutdown.signal)
        timeout = min(max(0.0, due - now), math.inf if again is None else again)
        for key, _ in self._selector.select(None if math.isinf(timeout) else timeout):
            # An earlier event of this round may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        self._ranks.show_due(self._state is State.RUNNING)
        if self._deadline <= time.monotonic():
            self._expire()

    def _handle(self, event: Event, seconds: float = math.inf) -> None:
        """Follow the table. The new state's deadline is in ``seconds``, or the old one if that is earlier."""
        state = State.DONE if event is Event.LOST else TRANSITIONS[self._state].get(event)
        if state is None:
            return
        now, changed = time.monotonic(), state is not self._state
        if changed and state in LIMITS:
            self._deadline = now + LIMITS[state]
        else:
            self._deadline = min(now + seconds, math.inf if event is Event.TIMEOUT else self._deadline)
        self._state = state
        if changed:
            self._enter(state)

    def _enter(self, state: State) -> None:
        self._banner.quiet = state in ENDING
        if state is State.STOPPING:
            self._ranks.send(self._shutdown.sigterm())
            if self._ranks.idle:
                self._deadline = time.monotonic()
        elif state is State.CLEANING_REMOTE:  # before this host, to which they report
            self._agents.clean_remotes(not self._ranks.completed)
        elif state is State.CLEANING_LOCAL:
            self._agents.give_up_remotes()
            if self._results and self._results_wanted:
                self._results.keep(self._directory)
            self._agents.clean_local(not self._ranks.completed)

    def _expire(self) -> None:
        """Act on the state's deadline."""
        now, state = time.monotonic(), self._state
        if state in (State.PREPARING, State.STARTING):
            self._deadline = math.inf
            text = f"only {self._ranks.connected} of {self._plan.ranks} ranks started within "
            text += f"{self._spec.start_timeout:g} s (--start-timeout)"
            self._fail("\n  ".join([text, *folded(self._ranks.not_started())]))
        elif state is State.STOPPING and now < self._shutdown.kill_at and not self._ranks.idle:
            self._deadline, name = self._shutdown.kill_at, signal_name(self._shutdown.signal)
            limit = "time" if self._spec.grace >= 3600 else f"{self._spec.grace:g} s"  # in the background
            text = f"the ranks have {limit} to exit. Ctrl-C (SIGINT) ends them now"
            self._err(f"ringdance: {name}: {text}\n".encode())
        elif state is State.FAILED and self._ranks.own_failure_reported() and not self._waited:
            self._waited, self._deadline = True, now + _SEE_S
        elif state not in CLEANING and not self._ranks.completed and self._cause_is_awaited():
            self._deadline = now + 0.05
        elif state is State.CLEANING_LOCAL:
            self._deadline = math.inf
            self._agents.kill_local()
        else:
            number = self._shutdown.signal
            if state is State.STOPPING and number and (late := self._ranks.running):
                seconds = f"{now - self._shutdown.came:.1f} s after {signal_name(number)}"
                self._err(f"ringdance: ranks {spans(late)} had not exited {seconds}: killed\n".encode())
            self._handle(Event.TIMEOUT, _TERM_S)

    def _cause_is_awaited(self) -> bool:
        """Return True if another host may still report why ranks have failed."""
        if self._outside or self._shutdown.signal or not self._plan.multi_host:
            return False
        if self._agents.pending:  # a silent host may be the cause
            return True
        verdict, _ = self._ranks.judge((), None)
        if verdict is None or not verdict.follows:
            return False
        self._cause_until = self._cause_until or time.monotonic() + _CAUSE_S
        return time.monotonic() < self._cause_until

    def on_note(self, text: str) -> None:
        """Show a detail from this process or an agent if the user asked for --verbose."""
        if self._spec.verbose:
            self._err(f"ringdance: {text}\n".encode())

    def on_progress(self) -> None:
        """Extend the deadline: results and output may be large, so it limits only the silence of agents."""
        if self._state in (State.CLEANING_REMOTE, State.CLEANING_LOCAL):
            self._deadline = time.monotonic() + LIMITS[self._state]

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number in PASSED_ON:
                self._ranks.send({"signal": number})
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        """End the job after a signal to the launcher."""
        # A signal sent to all processes may reach the launcher a little later than the ranks that it ended.
        caused = not self._outside and self._ranks.signals_ended_failed
        if not self._shutdown.signal and self._state is State.FAILED and caused:
            self._deadline = math.inf
        self._shutdown.add(number, self._deadline, caused)
        left = self._shutdown.kill_at - time.monotonic()
        self._handle(Event.STOP, max(0.0, min(left, _QUIET_S)))

    # --- ranks ---------------------------------------------------------------------------------

    def on_rank_message(self, link: RankLink, message: dict[str, Any]) -> None:
        """Handle a message from a rank's wrapper."""
        rank = self._ranks.of(link)
        if "rsh" in message:
            self._on_rsh(link, message["rsh"], message["command"])
        elif "rank" in message:
            wrong = self._ranks.add(link, message)
            if wrong:
                self._fail(f"{self._plan.mpi.mpiexec} {wrong}")
        elif rank and "pid" in message:
            self._ranks.on_start(rank, message["pid"])
            link.remote.time_here(message["time"])
            self.on_note(f"rank {rank.rank} runs on {rank.host}, pid {rank.pid}")
            if self._state is State.STOPPING:  # it was about to start when the other ranks received SIGTERM
                link.send(self._shutdown.sigterm())
            if self._ranks.started:
                self._handle(Event.STARTED)
        elif rank and "stopped" in message:
            who = f"rank {rank.rank} on {rank.host} (pid {rank.pid})"
            hint = f"the other ranks wait for it. Run `kill -CONT {rank.pid}` there to continue it"
            name = signal_name(message["stopped"])
            self._err(f"ringdance: {who} was stopped by {name}: {hint}\n".encode())
        elif rank and "ended" in message:
            when = link.remote.time_here(message["time"])
            end = message["ended"], when, message["by_mpiexec"], message["why"]
            self._on_rank_exit(rank, *end)

    def on_rank_output(self, link: RankLink, which: int, data: bytes) -> None:
        """Take a rank's output on stdout (0) or stderr (1). Empty data mean that it has closed the stream."""
        self._ranks.write(link, which, data)

    def on_rank_closed(self, link: RankLink) -> None:
        """Handle the end of a wrapper's connection."""
        rank = self._ranks.of(link)
        if rank and not rank.ended:
            self._on_rank_exit(rank, None, time.time())

    def _on_rank_exit(
        self, rank: Rank, code: int | None, when: float, by_mpiexec: bool = False, why: str = ""
    ) -> None:
        by_launcher = self._state in ENDING
        ended = Ended(rank.rank, rank.host, rank.pid, code, when, "", by_launcher, by_mpiexec, why=why)
        self._ranks.on_end(rank, ended)
        self.on_note(f"rank {rank.rank} ended: {code}")
        if ended.failed:
            killed = code is None or (code < 0 and -code not in STOPPING)
            self._handle(Event.FAILURE, _SEE_KILLED_S if killed else _SEE_S)
        if self._ranks.over or (self._state is State.STOPPING and self._ranks.idle):
            self._ranks.send({"over": True})
            soon = self._ranks.failed or by_launcher or self._mpiexec_code is not None
            self._handle(Event.OVER, 0.05 if soon else _EXIT_S)

    # --- mpiexec and hosts ---------------------------------------------------------------------

    def on_output(self, data: bytes) -> None:
        """Take output of mpiexec or one of its daemons."""
        self._banner.feed(data)
        if self._spec.verbose:
            self._err(data)

    def _on_mpiexec_exit(self, pid: int, code: int, when: float) -> None:
        self._mpiexec_code = code
        self.on_note(f"mpiexec (pid {pid}) ended: {code}")
        starting = self._state is State.STARTING and not self._outside and not self._ranks.connected
        if starting and code > 0 and self._rsh_used and not self._retried:
            self._retried = True
            self._err(b"ringdance: mpiexec could not start its daemons; retrying once\n")
            self._launch()
            return
        if code < 0 and self._state not in ENDING:
            name = signal_name(-code)
            self._fail(f"mpiexec (pid {pid}) was killed by {name} (signal {-code})", 128 - code)
        if self._ranks.over:
            self._handle(Event.OVER, 0.0)
        else:  # reports may still be unread in the sockets
            self._handle(Event.FAILURE, 0.3)

    def _on_daemon_exit(self, host: Host, code: int, when: float) -> None:
        # Open MPI's daemon exits only after its ranks, or because of an earlier failure.
        running = self._ranks.connected and not self._ranks.completed and self._state not in ENDING
        if code and running and self._plan.mpi.family == "openmpi":
            before = self._ranks.ended_by_mpiexec(host.ranks)  # by this daemon
            why = f"mpiexec's daemon (prted) exited with code {code} while ranks were running. Was it killed?"
            self._fail(f"{_named(host)}: {why}", 1, "daemon", min([when, *before]))

    def on_host_failed(self, host: str, message: str, lost: bool) -> None:
        """Handle the loss of a host, or the death of a program of the job there that is not a rank."""
        self._ranks.lost_hosts |= {host} if lost else set()
        self.on_note(f"host {host}: {message}")
        named = self._named(host)
        if self._state in CLEANING:
            if lost and self._results_wanted:
                self._fail(f"{named}: {message}, before all results of its ranks had arrived")
            if lost and self._agents.remotes_gone:
                self.on_clean(local=False)
        elif self._state is not State.STOPPING or lost:
            self._fail(f"{named}: {message}")

    def on_silence(self, host: str, text: str) -> None:
        """Report that a host has been silent for a while, or that it answers again."""
        self._err(f"ringdance: {self._named(host)}: {text}\n".encode())

    def _named(self, name: str) -> str:
        return next((_named(host) for host in self._plan.hosts if host.name == name), name)

    def _fail(self, message: str, code: int = 1, kind: str = "launcher", when: float = 0.0) -> None:
        """Record a failure outside the ranks."""
        at = when or time.time()
        self._outside.append(Cause(None, os.uname().nodename, os.getpid(), at, kind, message, code=code or 1))
        self._handle(Event.FAILURE, 0.1)

    # --- the end -------------------------------------------------------------------------------

    def on_clean(self, local: bool) -> None:
        """Continue once the agent on this host, or every agent on other hosts, has cleaned up or is lost."""
        if local or self._state is State.CLEANING_REMOTE:
            self._handle(Event.CLEAN)

    def on_local_lost(self, why: str) -> None:
        """Handle the end of the agent on this host."""
        if self._state not in CLEANING:
            self._fail(f"the job's agent on this host was killed ({why})", 128 + signal.SIGKILL)
        self._agents.give_up_remotes()
        self._handle(Event.LOST)

    def on_file(self, name: str, data: bytes, last: bool) -> None:
        """Take part of a file that a rank has left in the job's directory on its host; ``last`` ends it."""
        timeline = name.startswith(TIMELINE)
        if timeline or name.startswith(f"{OUTPUT}/"):
            path = self._spec.timeline if timeline else self._spec.output_directory + name[len(OUTPUT) :]
            self._collected.setdefault(name, CollectedFile(path, self._err)).take(data)
        elif self._results and self._results_wanted:
            try:
                self._results.take(self._directory, name, data, last)
            except LaunchError as error:
                self._fail(str(error))

    @property
    def _results_wanted(self) -> bool:
        well = self._ranks.completed and not self._outside and not self._shutdown.signal
        return well and self._results is not None

    def _result(self) -> Verdict | int:
        """Show the remaining output, then judge. All processes have exited."""
        self._ranks.end_streams()
        self._screen.freeze()
        self._banner.end()
        code = self._mpiexec_code
        verdict, completed = self._ranks.judge(self._outside, code)
        number, incomplete = self._shutdown.signal, completed < self._plan.ranks
        if verdict is None and incomplete and not (number and self._shutdown.caused_failures):
            output = b"".join(self._banner.unshown).decode(errors="replace").strip()
            self._fail(
                f"mpiexec exited with code {code}, but only {completed} of {self._plan.ranks} ranks reported "
                "that they had exited" + (f". Its output:\n{output}" if output else ""),
                abs(code or 1),
            )
            verdict, _ = self._ranks.judge(self._outside, code)
        self._ranks.show_held(verdict)
        unfinished = self._results is not None and not self._results.kept
        if number and (verdict or incomplete or unfinished) and self._shutdown.caused_failures:
            for cause in self._outside:
                self._err(f"ringdance: {cause.message}\n".encode())
            self._err(f"ringdance: {self._shutdown.sentence()}\n".encode())
            return 128 + number
        if len(self._ranks.alone) == self._plan.ranks > 1:
            framework = next(iter(self._ranks.alone.values()))
            self._err(
                f"ringdance: no rank called hvd.init(): {self._plan.ranks} programs used {framework} without "
                "exchanging anything through Ringdance. That is fine if they divide the work by RANK or "
                "communicate in another way. To train one model together, import one of ringdance.torch, "
                ".tensorflow, .keras and .jax as hvd (see README.md)\n".encode()
            )
        return verdict or 0

    def _close(self, local: Remote | None) -> None:
        """Close everything, because a notebook may run many jobs. Clean up here if the agent has not."""
        if not local:
            close_all(self._remotes)
        else:
            self._agents.close()
            if not local.clean:
                directories = [path for path in (self._directory, self._shared) if path]
                cleanup = Cleanup(self.id, directories, self._began)
                for pid in self._ranks.local_pids():
                    cleanup.note(pid)
                cleanup.run()
        if self._lock >= 0:
            os.close(self._lock)
        self._selector.close()
        self._signals.restore()


_SHIM = "ssh"
"""The file in the job's directory that mpiexec runs as ssh. ``session_environment`` uses the same name."""


def _locked(directory: str) -> int:
    """Open and lock an output directory, so that no other job writes to it if the file system has locks.

    Returns:
        The descriptor, which holds the lock.

    Raises:
        LaunchError: Another job holds the lock.
    """
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise LaunchError(f"--output-filename {directory}: another job is writing its output there") from None
    except OSError:  # a file system without locks
        pass
    return opened


def _named(host: Host) -> str:
    return f"host {host.name} (ranks {spans(host.ranks)})"
