"""A running job, seen from the launcher: one loop over output, reports of ranks, mpiexec and signals."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch import linux
from ringdance.launch.cause import Cause, Ended, Verdict, signal_name
from ringdance.launch.output import HELD_S, Banner
from ringdance.launch.plan import Plan, session_environment
from ringdance.launch.running import Options, Rank, conclude, job_folders, make_streams, show_held
from ringdance.launch.signals import PASSED_ON, Signals
from ringdance.launch.sweep import Sweep
from ringdance.launch.wire import Channel, bare_command

_SEE_S = 1.0  # after the first failure the other ranks may say what they see
# (a rank that has told of a failure of its own gets as much again: its exit code becomes the job's)
_SEE_KILLED_S = 0.5  # the same, when a signal ended it: there is nothing it could have told them
_TERM_S = 0.2  # after SIGTERM they may put their things in order
_STOP_S = 0.8  # the same, after Ctrl-C
_EXIT_S = 3.0  # mpiexec sometimes hangs after its ranks have ended well


class Job:
    """Runs a plan once.

    Raises (from :meth:`run`):
        LaunchError: the job could not be started at all.
    """

    def __init__(self, plan: Plan, options: Options) -> None:
        self._plan, self._options = plan, options
        self.id = uuid.uuid4().hex
        self._began = time.time()
        self._folder, self._shared = job_folders(self.id)
        self._folders = [folder for folder in (self._folder, self._shared) if folder]
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, Rank] = {}
        self._outside: list[Cause] = []
        self._deadlines: dict[str, float] = {}
        self._mpiexec: tuple[int, int | None] = (0, None)  # pid, how it ended
        self._guardian: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._banner = Banner(options.err)
        self._signal = 0
        self._signals = Signals()
        self._pipes: set[int] = set()
        self._ending = self._waited = self._cleaning = self._done = False

    # --- start ---------------------------------------------------------------------------------

    def run(self) -> Verdict | int:
        """Run to the end: 0, or 128 + the signal that stopped the launcher, or why the job failed."""
        try:
            if self._signals.wakes:
                self._selector.register(self._signals.wakes, selectors.EVENT_READ, self._obey_signals)
            self._start()
            while not self._done:
                self._step()
            return self._result()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        self._guardian = subprocess.Popen(
            bare_command("guardian", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=out[1],
            stderr=err[1],
            pass_fds=[theirs.fileno()],
            env=self._environment(),
            start_new_session=True,
        )
        theirs.close()
        for read, write in (out, err):
            os.close(write)
            os.set_blocking(read, False)
            self._pipes.add(read)
            self._selector.register(read, selectors.EVENT_READ, lambda read=read: self._from_mpiexec(read))
        self._channel = Channel(ours)
        self._channel.send({"job": self.id, "folders": self._folders, "began": self._began})
        self._selector.register(ours, selectors.EVENT_READ, self._from_guardian)
        self._deadlines["start"] = time.monotonic() + self._options.start_timeout

    def _environment(self) -> dict[str, str]:
        own = self._plan.environ(os.environ)
        session = session_environment(self._plan.mpi.family, self._folder, self._shared)
        return {**own, **session, linux.MARKER: self.id}

    def _launch(self, problem: str) -> None:
        """The guardian has made the folders: listen there, and let it start mpiexec."""
        if problem:
            raise LaunchError(
                f"the job's folder cannot be made: {problem}. Set TMPDIR to a folder you can write to"
            )
        assert self._channel
        assert self._guardian
        path = os.path.join(self._folder, "s")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1024)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._options.prepare(self._folder)
        argv = self._plan.argv(path, str(self._guardian.pid))
        argv += [self._folder] if self._options.folder_argument else []
        self._channel.send({"start": argv, "env": self._environment(), "cwd": os.getcwd()})

    # --- the loop ------------------------------------------------------------------------------

    def _step(self) -> None:
        now = time.monotonic()
        waiting = [*self._deadlines.values(), *(since + HELD_S for since in self._held_since())]
        timeout = max(0.0, min(waiting) - now) if waiting else None
        for key, _ in self._selector.select(timeout):
            # What came before in this round may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        for rank in self._ranks.values():
            since = rank.streams[1].held_since
            if since is not None and now >= since + HELD_S and not rank.ended and not self._deadlines:
                rank.streams[1].release()
        for name in [name for name, at in self._deadlines.items() if at <= now]:
            if self._deadlines.pop(name, None) is not None:  # one may have called off another
                getattr(self, f"_on_{name}")()

    def _held_since(self) -> list[float]:
        if self._deadlines or self._cleaning:
            return []
        found = (rank.streams[1].held_since for rank in self._ranks.values() if not rank.ended)
        return [since for since in found if since is not None]

    def _say(self, text: str) -> None:
        if self._options.verbose:
            self._options.err(f"ringdance: {text}\n".encode())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(True)
        channel = Channel(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._from_rank(channel))

    def _from_rank(self, channel: Channel) -> None:
        messages, descriptors, alive = channel.receive()
        rank = next((rank for rank in self._ranks.values() if rank.channel is channel), None)
        for message in messages:
            if "rank" in message:
                rank = self._welcome(channel, message, descriptors)
            elif "pid" in message and rank:
                self._started(rank, message["pid"])
            elif "ended" in message and rank:
                self._ended(rank, message["ended"], message["time"], message["by_mpiexec"])
        if not alive:
            self._selector.unregister(channel.sock)
            channel.sock.close()
            if rank and not rank.ended:
                self._ended(rank, None, time.time())

    def _welcome(self, channel: Channel, hello: Mapping[str, Any], descriptors: list[int]) -> Rank:
        number, ranks, options = int(hello["rank"]), self._plan.ranks, self._options
        try:
            streams = make_streams(number, ranks, (options.out, options.err), options.style, options.folder)
        except OSError as error:
            raise LaunchError(f"--output-filename {options.folder}: {error}") from None
        rank = Rank(
            channel, number, str(hello["host"]), streams, dict(zip(descriptors, streams, strict=True))
        )
        if int(hello["size"]) != ranks or number in self._ranks:
            self._fail_outside(
                f"{self._plan.mpi.mpiexec} started a world of {hello['size']} ranks instead of {ranks}: "
                "it does not belong to the MPI library in use",
                1,
            )
            return rank
        self._ranks[number] = rank
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
            self._selector.register(
                descriptor, selectors.EVENT_READ, lambda d=descriptor: self._from_stream(rank, d)
            )
        # mpiexec's own forwarding of stdin is not used: Open MPI's does not pass on its end to every program.
        own = number == 0 and options.stdin >= 0
        stdin = os.dup(options.stdin) if own else os.open(os.devnull, os.O_RDONLY)
        try:
            channel.send_with({"go": True}, [stdin])
        except OSError:
            pass  # that it is gone will be seen by reading
        os.close(stdin)
        return rank

    def _started(self, rank: Rank, pid: int) -> None:
        rank.pid = pid
        if self._channel:
            self._channel.send({"pid": pid})
        self._say(f"rank {rank.rank} runs on {rank.host}, pid {pid}")
        if all(rank.pid for rank in self._ranks.values()) and len(self._ranks) == self._plan.ranks:
            self._deadlines.pop("start", None)

    def _from_stream(self, rank: Rank, descriptor: int) -> None:
        if rank.read(descriptor) is None:
            self._selector.unregister(descriptor)

    def _from_mpiexec(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if data:
            self._banner.feed(data)
            if self._options.verbose:
                self._options.err(data)
        else:
            self._selector.unregister(descriptor)
            self._pipes.remove(descriptor)
            os.close(descriptor)

    def _from_guardian(self) -> None:
        assert self._channel
        messages, _, alive = self._channel.receive()
        for message in messages:
            if "ready" in message:
                self._launch(message["problem"])
            elif "mpiexec" in message:
                self._mpiexec = (message["mpiexec"], None)
                self._say(f"mpiexec runs, pid {message['mpiexec']}")
            elif "ended" in message:
                self._mpiexec_ended(message["ended"])
            elif "cleaned" in message:
                self._done = True
        if not alive:
            self._selector.unregister(self._channel.sock)
            if not self._done:
                self._guardian_lost()

    # --- what can happen -----------------------------------------------------------------------

    def _ended(self, rank: Rank, code: int | None, when: float, by_mpiexec: bool = False) -> None:
        rank.ended = Ended(rank.rank, rank.host, rank.pid, code, when, "", self._ending, by_mpiexec)
        self._say(f"rank {rank.rank} ended: {code}")
        if rank.ended.failed:
            self._expect("see", _SEE_S if code is not None and code > 0 else _SEE_KILLED_S)
        if len(self._ranks) == self._plan.ranks and all(rank.ended for rank in self._ranks.values()):
            failed = any(rank.ended and rank.ended.failed for rank in self._ranks.values())
            if failed or self._ending or self._mpiexec[1] is not None:
                self._expect("clean", 0.05)
            else:
                self._expect("clean", _EXIT_S)

    def _mpiexec_ended(self, code: int) -> None:
        self._mpiexec = (self._mpiexec[0], code)
        self._say(f"mpiexec ended: {code}")
        if code < 0 and not self._ending and not self._cleaning:
            name = signal_name(-code)
            self._fail_outside(
                f"mpiexec (pid {self._mpiexec[0]}) was killed by {name} (signal {-code})", 128 - code
            )
        complete = len(self._ranks) == self._plan.ranks and all(rank.ended for rank in self._ranks.values())
        # Reports may still lie in the sockets.
        self._expect("clean", 0.0 if complete else 0.3)

    def _guardian_lost(self) -> None:
        assert self._guardian
        code = self._guardian.wait()
        if not self._cleaning:
            self._fail_outside(
                f"the job's guardian (pid {self._guardian.pid}) was killed: {code}", 128 + abs(code)
            )
        self._sweep()
        self._done = True

    def _fail_outside(self, message: str, code: int) -> None:
        self._outside.append(
            Cause(None, os.uname().nodename, os.getpid(), time.time(), "launcher", message, code=code or 1)
        )
        self._expect("see", 0.1)

    def _expect(self, name: str, seconds: float) -> None:
        """Do ``_on_<name>`` in that time, or earlier if that has been decided before."""
        if not self._cleaning:
            at = time.monotonic() + seconds
            self._deadlines[name] = min(at, self._deadlines.get(name, at))

    def _on_start(self) -> None:
        self._fail_outside(
            f"only {len(self._ranks)} of {self._plan.ranks} ranks started within "
            f"{self._options.start_timeout:g} s (--start-timeout)",
            1,
        )

    def _on_see(self) -> None:
        marks = [mark for rank in self._ranks.values() if rank.running for mark in rank.streams[1].marks]
        if any(not mark.follows for mark in marks) and not self._waited:
            self._waited = True
            self._expect("see", _SEE_S)
        else:
            self._terminate(_TERM_S)

    def _terminate(self, seconds: float) -> None:
        if not self._ending:
            self._ending = self._banner.quiet = True
            for rank in self._ranks.values():
                if rank.running:
                    rank.channel.send({"signal": int(signal.SIGTERM)})
            running = any(not rank.ended for rank in self._ranks.values())
            self._expect("clean", seconds if running else 0.0)

    def _on_clean(self) -> None:
        """The end: nothing of the job may be left."""
        self._deadlines.clear()
        self._cleaning = self._ending = self._banner.quiet = True
        self._options.collect(self._folder)
        if not (self._channel and self._channel.send({"clean": True, "failed": not self._completed()})):
            return  # the guardian's end will be noticed by the loop
        self._deadlines["stuck"] = time.monotonic() + 6.0

    def _completed(self) -> bool:
        ends = [rank.ended for rank in self._ranks.values()]
        return len(ends) == self._plan.ranks and all(end and not end.failed for end in ends)

    def _on_stuck(self) -> None:
        if self._guardian:
            self._guardian.kill()

    def _sweep(self) -> None:
        sweep = Sweep(self.id, self._folders, self._began)
        for rank in self._ranks.values():
            sweep.note(rank.pid)
        sweep.run()

    def _abandon(self) -> None:
        """An exception goes through the launcher itself: closing the channel makes the guardian clean up."""
        if self._channel:
            self._channel.sock.close()
        if self._guardian:
            try:
                self._guardian.wait(6.0)
            except subprocess.TimeoutExpired:
                self._guardian.kill()
                self._sweep()

    def _obey_signals(self) -> None:
        for number in self._signals.take():
            if number in PASSED_ON:
                for rank in self._ranks.values():
                    if rank.running:
                        rank.channel.send({"signal": number})
            elif self._signal:
                self._expect("clean", 0.0)
            else:
                self._signal = number
                self._deadlines.pop("see", None)
                self._terminate(_STOP_S)

    # --- result --------------------------------------------------------------------------------

    def _result(self) -> Verdict | int:
        """All processes are gone: show the rest of the output, then judge."""
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.finish()
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
        if verdict and self._signal:
            return 128 + self._signal
        return verdict or 0

    def _close(self) -> None:
        """Close everything: a notebook may run many jobs."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        for descriptor in self._pipes:
            os.close(descriptor)
        self._selector.close()
        self._signals.restore()
        if self._guardian:
            self._guardian.wait()
