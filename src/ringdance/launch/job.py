"""A running job, seen from the launcher: one loop over output, reports of ranks, mpiexec and signals."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.agent import paths
from ringdance.launch.cause import Cause, Ended, Verdict, signal_name
from ringdance.launch.directories import OWN_FOLDER, SHARED, host_folder, host_shared
from ringdance.launch.here import Here, door_script, write_private
from ringdance.launch.hosts import Host
from ringdance.launch.messages import Channel
from ringdance.launch.mpi.options import MACHINE_FILE, RSH_SHIM, machine_file, session_environment
from ringdance.launch.output.stream import MpiexecOutput
from ringdance.launch.plan import Plan
from ringdance.launch.ranks import RankTable
from ringdance.launch.remote.agents import Agents, RankChannel
from ringdance.launch.remote.connect import Remote, together
from ringdance.launch.running import Options, Rank, conclude, show_held, usable_bases
from ringdance.launch.system import linux, machine
from ringdance.launch.system.signals import PASSED_ON, Signals

_SEE_S = 1.0  # after the first failure the other ranks may say what they see
# (a rank that has told of a failure of its own gets as much again: its exit code becomes the job's)
_SEE_KILLED_S = 0.5  # the same, when a signal ended it: there is nothing it could have told them
_CAUSE_S = 1.0  # another host may report the failure that others follow from
_TERM_S = 0.2  # after SIGTERM they may put their things in order
_EXIT_S = 3.0  # mpiexec sometimes hangs after its ranks have ended well
_CLEAN_S = 6.0
_AGENTS_S = 3.0  # of that for other hosts


class Job:
    """Runs a plan once.

    Args:
        plan: what is to be started.
        options: how.
        remotes: an agent on each host of the plan that is not this machine; ended with the job.

    Raises (from :meth:`run`):
        LaunchError: the job could not be started at all.
    """

    def __init__(self, plan: Plan, options: Options, remotes: Sequence[Remote] = ()) -> None:
        self._plan, self._options = plan, options
        self.id = uuid.uuid4().hex
        self._began = time.time()
        self._bases, self._folder, self._shared = list[str](), "", host_shared(self.id)
        self._selector = selectors.DefaultSelector()
        self._agents = Agents(remotes, self._selector, self, options.silence)
        self._table = RankTable(plan, options, self._selector, self._agents)
        self._outside: list[Cause] = []
        self._deadlines: dict[str, float] = {}
        self._mpiexec: tuple[int, int | None] = (0, None)  # pid, how it ended
        self._here: Here | None = None
        self._here_ready = False
        self._daemons_wanted = self._tried_again = False
        self._banner = MpiexecOutput(options.err)
        self._signal = 0
        self._cause_until = 0.0
        self._signals = Signals()
        self._ending = self._waited = self._cleaning = self._swept = self._done = False

    # --- start ---------------------------------------------------------------------------------

    def run(self) -> Verdict | int:
        """Run to the end: 0, or 128 + the signal that stopped the launcher, or why the job failed."""
        try:
            if self._signals.wakes:
                self._selector.register(self._signals.wakes, selectors.EVENT_READ, self._obey_signals)
            self._bases = usable_bases()
            self._folder = host_folder(self._bases[0], self.id)
            folders = [folder for folder in (self._folder, self._shared) if folder]
            for note in self._plan.notes:
                self._options.err(f"ringdance: {note}\n".encode())
            self._here = Here(self.id, folders, self._began, self._selector, self, self._environment())
            self._here.keep_alive(self._agents.frames)
            self._agents.begin(self._order(), self._options.files)
            self._deadlines["start"] = time.monotonic() + self._options.start_timeout
            while not self._done:
                self._step()
            return self._result()
        except BaseException:
            if self._here:
                self._here.abandon()
            raise
        finally:
            self._close()

    def _environment(self) -> dict[str, str]:
        own = self._plan.environ(os.environ)
        session = session_environment(self._plan.mpi.family, self._folder, SHARED if self._shared else "")
        place = paths.variables(os.getcwd()) if self._plan.differs else {}
        # Open MPI does not start without HOME.
        return {"HOME": machine.home(), **own, **session, **place, linux.MARKER: self.id}

    def _order(self) -> dict[str, Any]:
        """What the agents must know; they fill in the names of the folders on their hosts."""
        session = session_environment(self._plan.mpi.family, OWN_FOLDER, SHARED)
        return {
            "job": self.id,
            "bases": self._bases,
            "cwd": self._plan.chdir or os.getcwd(),
            "launcher": paths.launchers_place() if self._plan.differs else None,
            "needed": self._options.needed,
            "environ": {**self._plan.forwarded(os.environ), **session},
        }

    def here_ready(self, problem: str) -> None:
        if problem:
            raise LaunchError(
                f"the job's directory cannot be made: {problem}. Set TMPDIR to one that can be written"
            )
        for name, data in self._options.files.items():
            write_private(os.path.join(self._folder, name), data)
        self._here_ready = True
        self.agents_ready()

    def agents_ready(self) -> None:
        """Everybody listens: mpiexec may start."""
        if self._agents.ready and self._agents.problems:
            raise LaunchError(together(self._agents.problems))
        if self._here and self._here_ready and self._agents.ready and not self._cleaning:
            door = os.path.join(self._folder, "ssh")  # (the name is in session_environment too)
            hosts = machine_file(self._plan.hosts, self._plan.mpi.family)
            script = door_script(self._here.socket_path)
            files = {door: (script, 0o700), MACHINE_FILE.replace(RSH_SHIM, door): (hosts, 0o600)}
            argv = self._plan.argv(self._bases, self.id, door)
            # Hydra's daemons go to mpiexec's directory, which may be nowhere else; ranks to their own.
            cwd = "/" if self._plan.differs else os.getcwd()
            wide = self._plan.wide
            self._here.launch(argv, self._environment(), cwd, files if wide else {}, alone=not wide)

    def door_opened(self, host: str, command: str, done: Callable[[int], None]) -> None:
        found = self._plan.host_of(host)
        # mpiexec gives its daemons its own settings, which name this host's folder. Daemons that shared one
        # would at times have the same process id, and so the same files: each takes its own host's.
        command = command.replace(self._folder, OWN_FOLDER)
        self._daemons_wanted = True
        if found is None or not self._agents.spawn(found.name, command, done):
            self._fail_outside(f"mpiexec wants to start something on {host}, which is no host of this job", 1)
            done(255)

    # --- the loop ------------------------------------------------------------------------------

    def _step(self) -> None:
        now = time.monotonic()
        holds = not self._deadlines and not self._cleaning
        waiting = [*self._deadlines.values(), *self._table.fold_until()]
        waiting += self._table.held_until() if holds else ()
        if self._plan.wide and not self._swept:
            waiting.append(now + self._agents.look())
        timeout = max(0.0, min(waiting) - now) if waiting else None
        for key, _ in self._selector.select(timeout):
            # What came before in this round may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        if not self._deadlines:
            self._table.release_held()
        self._table.unfold()
        for name in [name for name, at in self._deadlines.items() if at <= now]:
            if self._deadlines.pop(name, None) is not None:  # one may have called off another
                getattr(self, f"_on_{name}")()

    def _say(self, text: str) -> None:
        if self._options.verbose:
            self._options.err(f"ringdance: {text}\n".encode())

    # --- ranks ---------------------------------------------------------------------------------

    def supervisor_said(
        self, channel: Channel | RankChannel, message: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> None:
        rank = self._table.of(channel)
        if "rank" in message:
            wrong = self._table.welcome(channel, message, descriptors)
            if wrong:
                self._fail_outside(f"{self._plan.mpi.mpiexec} {wrong}", 1)
        elif rank and "pid" in message:
            self._started(rank, message["pid"])
        elif rank and "stopped" in message:
            self._stopped(rank, message["stopped"])
        elif rank and "ended" in message:
            self._ended(rank, message["ended"], message["time"], message["by_mpiexec"])

    rank_said = supervisor_said

    def supervisor_gone(self, channel: Channel | RankChannel) -> None:
        rank = self._table.of(channel)
        if rank and not rank.ended:
            self._ended(rank, None, time.time())

    rank_gone = supervisor_gone

    def rank_wrote(self, channel: RankChannel, which: int, data: bytes) -> None:
        self._table.wrote(channel, which, data)

    def _started(self, rank: Rank, pid: int) -> None:
        rank.pid = pid
        if self._here and not isinstance(rank.channel, RankChannel):
            self._here.note(pid)
        self._say(f"rank {rank.rank} runs on {rank.host}, pid {pid}")
        if self._table.started:
            self._deadlines.pop("start", None)

    def _stopped(self, rank: Rank, number: int) -> None:
        who = f"rank {rank.rank} on {rank.host} (pid {rank.pid})"
        go_on = f"the others wait for it. `kill -CONT {rank.pid}` there continues it"
        self._options.err(f"ringdance: {who} was stopped by {signal_name(number)}: {go_on}\n".encode())

    # --- what can happen -----------------------------------------------------------------------

    def mpiexec_said(self, data: bytes) -> None:
        self._banner.feed(data)
        if self._options.verbose:
            self._options.err(data)

    def mpiexec_started(self, pid: int) -> None:
        self._mpiexec = (pid, None)
        self._say(f"mpiexec runs, pid {pid}")

    def mpiexec_open(self, why: str) -> None:
        self._say(f"mpiexec listens on all of this host's addresses, it cannot be bound to loopback: {why}")

    def _ended(self, rank: Rank, code: int | None, when: float, by_mpiexec: bool = False) -> None:
        rank.ended = Ended(rank.rank, rank.host, rank.pid, code, when, "", self._ending, by_mpiexec)
        self._say(f"rank {rank.rank} ended: {code}")
        if rank.ended.failed:
            self._expect("see", _SEE_S if code is not None and code > 0 else _SEE_KILLED_S)
        if self._table.over:
            self._table.release()
            soon = self._table.failed or self._ending or self._mpiexec[1] is not None
            self._expect("clean", 0.05 if soon else _EXIT_S)

    def mpiexec_ended(self, code: int) -> None:
        self._mpiexec = (self._mpiexec[0], code)
        self._say(f"mpiexec ended: {code}")
        if self._start_failed(code) and not self._tried_again:
            self._tried_again = True
            self._options.err(b"ringdance: mpiexec could not start its daemons; it is tried once more\n")
            self.agents_ready()
            return
        if code < 0 and not self._ending and not self._cleaning:
            name = signal_name(-code)
            self._fail_outside(
                f"mpiexec (pid {self._mpiexec[0]}) was killed by {name} (signal {-code})", 128 - code
            )
        # Reports may still lie in the sockets.
        self._expect("clean", 0.0 if self._table.over else 0.3)

    def _start_failed(self, code: int) -> bool:
        """Whether mpiexec has ended with an error between wanting its daemons and starting any rank."""
        well = not (self._ending or self._cleaning or self._outside)
        return well and code > 0 and self._daemons_wanted and not self._table.come

    def guardian_lost(self, pid: int, code: int) -> None:
        if not self._cleaning:
            self._fail_outside(f"the job's guardian (pid {pid}) was killed: {code}", 128 + abs(code))
        assert self._here
        self._here.sweep()
        self._agents.give_up()
        self._done = True

    def host_failed(self, host: str, message: str, lost: bool) -> None:
        self._say(f"host {host}: {message}")
        if self._cleaning:
            if lost and self._results_wanted:
                why = f"{message}, before all that its ranks returned had come"
                self._fail_outside(f"{self._named(host)}: {why}", 1)
            if lost and self._agents.gone:
                self.agents_clean()
        elif not self._ending or lost:
            self._fail_outside(f"{self._named(host)}: {message}", 1)

    def daemon_ended(self, host: str, code: int, when: float) -> None:
        # Open MPI's own does so only after its ranks, or in consequence of a failure that came before.
        running = self._table.come and not self._table.completed and not self._ending
        if code and running and self._plan.mpi.family == "openmpi":
            before = self._table.ended_by_mpiexec(self._placed(host).ranks)  # by this daemon
            why = f"mpiexec's daemon (prted) ended with code {code} while ranks ran. Was it killed?"
            self._fail_outside(f"{self._named(host)}: {why}", 1, "daemon", min([when, *before]))

    def _placed(self, host: str) -> Host:
        return next(found for found in self._plan.hosts if found.name == host)

    def _named(self, host: str) -> str:
        return f"host {host} (ranks {_numbers(self._placed(host).ranks)})"

    def _fail_outside(self, message: str, code: int, kind: str = "launcher", when: float = 0.0) -> None:
        at = when or time.time()
        self._outside.append(Cause(None, os.uname().nodename, os.getpid(), at, kind, message, code=code or 1))
        self._expect("see", 0.1)

    def _expect(self, name: str, seconds: float) -> None:
        """Do ``_on_<name>`` in that time, or earlier if that has been decided before."""
        if not self._cleaning:
            at = time.monotonic() + seconds
            self._deadlines[name] = min(at, self._deadlines.get(name, at))

    def _on_start(self) -> None:
        self._fail_outside(
            f"only {self._table.come} of {self._plan.ranks} ranks started within "
            f"{self._options.start_timeout:g} s (--start-timeout)",
            1,
        )

    def _on_see(self) -> None:
        if self._table.own_failure_told() and not self._waited:
            self._waited = True
            self._expect("see", _SEE_S)
        elif self._cause_is_awaited():
            self._expect("see", 0.05)
        else:
            self._terminate(_TERM_S)

    def _cause_is_awaited(self) -> bool:
        """Whether another host may still report why ranks have failed: what is known only follows from it."""
        if self._outside or self._signal or not self._plan.wide:
            return False
        if self._agents.pending:  # a silent host may be the cause
            return True
        verdict, _ = conclude(self._table.everyone(), (), None)
        if verdict is None or not verdict.follows:
            return False
        self._cause_until = self._cause_until or time.monotonic() + _CAUSE_S
        return time.monotonic() < self._cause_until

    def _terminate(self, seconds: float) -> None:
        if not self._ending:
            self._ending = self._banner.quiet = True
            self._table.signal(int(signal.SIGTERM))
            self._expect("clean", 0.0 if self._table.idle else seconds)

    def _on_clean(self) -> None:
        """The end: nothing of the job may be left, on the other hosts first, which report to here."""
        if not self._table.completed and self._cause_is_awaited():
            self._expect("clean", 0.05)
            return
        self._deadlines.clear()
        self._cleaning = self._ending = self._banner.quiet = True
        self._deadlines = {"agents": time.monotonic() + _AGENTS_S, "stuck": time.monotonic() + _CLEAN_S}
        self._agents.clean(not self._table.completed)

    def agents_clean(self) -> None:
        if self._cleaning and self._here and not self._swept:
            self._swept = True
            if self._options.results and self._results_wanted:
                self._options.results.keep(self._folder)
            self._here.clean(not self._table.completed)

    @property
    def _results_wanted(self) -> bool:
        well = self._table.completed and not self._outside and not self._signal
        return well and self._options.results is not None

    def file_came(self, name: str, data: bytes, last: bool) -> None:
        if self._options.results and self._results_wanted:
            try:
                self._options.results.take(self._folder, name, data, last)
            except LaunchError as error:
                self._fail_outside(str(error), 1)

    def here_clean(self) -> None:
        self._done = True

    def _on_agents(self) -> None:
        if self._results_wanted:  # which may be large; a host that says nothing meanwhile will be lost
            now = time.monotonic()
            self._deadlines |= {"agents": now + _AGENTS_S, "stuck": now + _CLEAN_S}
            return
        self._agents.give_up()
        self.agents_clean()

    def _on_stuck(self) -> None:
        if self._here:
            self._here.kill_guardian()

    def _obey_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGTSTP:
                self._agents.pause(True)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._agents.pause(False)
            elif number in PASSED_ON:
                self._table.signal(number)
            elif self._signal:
                self._expect("clean", 0.0)
            else:
                self._signal = number
                self._deadlines.pop("see", None)
                self._terminate(self._options.grace)

    # --- result --------------------------------------------------------------------------------

    def _result(self) -> Verdict | int:
        """All processes are gone: show the rest of the output, then judge."""
        ranks = self._table.everyone()
        for rank in ranks:
            rank.finish()
        self._options.screen.freeze()
        self._banner.end()
        code = self._mpiexec[1]
        verdict, completed = conclude(ranks, self._outside, code)
        if verdict is None and completed < self._plan.ranks:
            said = b"".join(self._banner.unshown).decode(errors="replace").strip()
            self._fail_outside(
                f"mpiexec ended with code {code}, but only {completed} of {self._plan.ranks} ranks reported "
                "their end" + (f"; it said:\n{said}" if said else ""),
                abs(code or 1),
            )
            verdict, _ = conclude(ranks, self._outside, code)
        show_held(ranks, verdict)
        self._table.unfold(everything=True)
        unfinished = self._options.results is not None and not self._options.results.kept
        if self._signal and (verdict or unfinished):
            return 128 + self._signal
        return verdict or 0

    def _close(self) -> None:
        """Close everything: a notebook may run many jobs."""
        self._agents.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._signals.restore()
        if self._here:
            self._here.close()


def _numbers(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
