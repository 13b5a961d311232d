"""The wrapper that mpiexec starts for each rank. It runs the user's command and reports how it ended.

It finds the socket of its host's agent (main.py) by the job's ID. It has two processes. mpiexec starts the
front, and may SIGKILL it at any moment (Hydra does so as soon as a rank aborts). The front's child, the
supervisor, survives long enough to end the rank and to report. The rank's stdout and stderr are pipes whose
read ends are sent over the socket, so that output can be assigned to its rank with every MPI library.
Standard library only. The wrapper starts in about 30 ms.

Supervisor to launcher: ``{"rank", "size", "host"}`` with stdout and stderr to read, then
``{"pid", "time"}``, ``{"stopped": signal}`` when the rank is stopped, then ``{"ended": exit code or -signal,
"time": seconds since the epoch, "by_mpiexec": true if mpiexec ended it, "why": evidence for a signal}``.
Launcher to supervisor: ``{"go": the rank's numbers, "port": MASTER_PORT}`` with a descriptor of the rank's
stdin. The agent adds ``"environ"`` to this message: variables that a shell may have dropped on the way.
Then ``{"signal": n}`` for the rank, with ``"after"``, the delay in seconds, and ``"stay"``, the seconds for
which mpiexec must not learn that the rank has ended; and ``{"over"}`` when all ranks have ended. Closing the
connection ends the rank immediately.

Note [Signals to all processes]
A scheduler that ends a job may signal all of its processes: launcher, agents, mpiexec, wrappers and ranks.
Only the launcher decides what follows. Agents catch these signals and do nothing. mpiexec, which would end
the ranks within a second, runs with them blocked (programs.py). The front passes on only signals from
mpiexec. The supervisor passes on none, but records that its rank has received the signal too, so that it
can drop the launcher's own signal.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..directories import SHARED, bases, host_directory, host_shared, is_own
from ..messages import Channel
from ..system import linux
from . import paths

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_BEFORE_OTHERS_S = 1.5
_SAME_S = 2.0  # maximum seconds between a signal to all processes and the launcher's own signal
_FULL = 1 << 20  # number of free bytes below which /dev/shm counts as full
DIRECTORY = "RINGDANCE_JOB_DIRECTORY"
"""Environment variable of the rank: the job's directory on its host."""

_TORCH = {
    "RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "CROSS_RANK": "GROUP_RANK",
}  # fmt: skip
"""The rank's numbers, and torchrun's names for them, which frameworks such as Lightning read."""


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as given in the launcher's variables.

    Raises:
        LookupError: None of the known launchers' variables are set.
    """
    for rank, size in _VARIABLES:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    raise LookupError(
        "mpiexec has set none of OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID. This process has no rank."
    )


def _exec(command: list[str], where: Mapping[str, int], port: int, streams: list[int], parent: int) -> None:
    """Execute the rank's command in the child process. Exits if the command cannot be executed."""
    # Use a separate process group, so that signals from mpiexec to the wrapper's group arrive only once.
    os.setpgid(0, 0)
    linux.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
    signal.set_wakeup_fd(-1)
    for number in (*_FORWARDED, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    # A request to save (SIGUSR1, SIGUSR2) must not kill a program that has no handler, or none yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, value in where.items():
        os.environ[f"RINGDANCE_{name}"] = os.environ[f"HOROVOD_{name}"] = str(value)
        if name in _TORCH:
            os.environ[_TORCH[name]] = str(value)
    # This tells libraries that the variables above are set. Without it, Lightning prefers Slurm's variables,
    # which are the same for all ranks that an agent starts, and then MPI's, which include no MASTER_ADDR.
    os.environ["TORCHELASTIC_RUN_ID"] = os.path.basename(os.environ[DIRECTORY])
    if port:
        os.environ.setdefault("MASTER_PORT", str(port))
    os.environ["HOROVOD_HOSTNAME"] = os.uname().nodename
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"ringdance: cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def reason_of(code: int, out_of_memory: bool) -> str:
    """Return a clause that explains the signal that has just ended the rank, or "" if no reason is known.

    Args:
        code: Exit code or -signal.
        out_of_memory: True if the kernel killed a process in the rank's cgroup for lack of memory.
    """
    if code == -signal.SIGKILL and out_of_memory:
        return "by the kernel, because its container (cgroup) reached its memory limit"
    free = linux.shared_memory()
    if code == -signal.SIGBUS and 0 <= free < _FULL:
        return f"/dev/shm is full ({free >> 10} KiB free): there was no space for memory that it mapped"
    # Space in /dev/shm may have been freed since then, so its free space is not conclusive.
    reason = "a file that it had mapped was truncated or could not be read, or /dev/shm was full (it has"
    return f"{reason} {max(0, free) >> 20} MiB free now)" if code == -signal.SIGBUS else ""


class _Supervisor:
    """The rank's parent process, which mpiexec cannot kill.

    Args:
        channel: Connection to the launcher.
        front: Read end of a pipe that carries the numbers of mpiexec's signals. Closed when the front exits.
    """

    def __init__(self, channel: Channel, front: int) -> None:
        self._channel, self._front = channel, front
        self._wake = linux.wake_on_signals()
        self._child = 0
        self._stay = _BEFORE_OTHERS_S
        self._had: dict[int, float] = {}  # when each signal to all processes arrived
        self._front_gone = self._mpiexec_sent_sigterm = False
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: self._had.update({number: time.monotonic()}))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def run(self, command: list[str]) -> int:
        """Run the rank until it ends. Return its exit code as a shell would."""
        try:
            rank, size = rank_and_size(os.environ)
        except LookupError as error:
            sys.exit(f"ringdance: {error}")
        out, err = os.pipe(), os.pipe()
        hello = {"rank": rank, "size": size, "host": os.uname().nodename}
        go = self._announce(hello, [out[0], err[0]])
        if go is None:
            return 1
        where, port, stdin = go
        parent, killed = os.getpid(), linux.killed_for_memory()
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self._had.clear()  # these signals arrived before the rank existed
        self._child = os.fork()
        if self._child == 0:
            _exec(command, where, port, [stdin, out[1], err[1]], parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        for descriptor in (stdin, *out, *err):
            os.close(descriptor)
        self._channel.send({"pid": self._child, "time": time.time()})
        code = self._wait()
        if code is None:
            return 1
        by_mpiexec = self._front_gone or (self._mpiexec_sent_sigterm and code == -signal.SIGTERM)
        why = reason_of(code, linux.killed_for_memory() > killed)
        self._channel.send({"ended": code, "time": time.time(), "by_mpiexec": by_mpiexec, "why": why})
        # mpiexec ends the other ranks when it sees a failure, or any exit without MPI_Finalize. Give them a
        # moment to report what they saw, or to exit.
        self._child, began, alive = 0, time.monotonic(), True
        while alive and not self._front_gone and (left := began + self._stay - time.monotonic()) > 0:
            alive = self._listen([self._channel.sock.fileno(), self._front], left)
        return code if code >= 0 else 128 - code

    def _announce(self, hello: dict[str, Any], streams: list[int]) -> tuple[dict[str, int], int, int] | None:
        """Send ``hello``. Return the rank's numbers, MASTER_PORT and stdin, or None if the agent exits."""
        alive, descriptors = self._channel.send(hello, streams), list[int]()
        while alive:  # a large message arrives in parts, and the descriptor comes with the first
            messages, received, alive = self._channel.receive()
            descriptors += received
            for message in messages:
                os.environ.update(message["environ"])
                return message["go"], message["port"], descriptors[0]
        return None

    def _send(self, number: int) -> None:
        # Do not signal the rank's process group: helpers in it remove shared memory once the rank is gone.
        # The cleanup ends them later.
        if self._child:
            linux.send_signal(self._child, number)

    def _wait(self) -> int | None:
        """Pass on signals until the rank ends. Return its exit code, -signal, or None if the agent exits."""
        while True:
            pid, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self._channel.send({"stopped": os.WSTOPSIG(status)})
            elif pid:
                return os.waitstatus_to_exitcode(status)
            front = [] if self._front_gone else [self._front]
            if not self._listen([self._channel.sock.fileno(), self._wake, *front]):
                self._send(signal.SIGKILL)
                return None

    def _listen(self, watched: list[int], seconds: float | None = None) -> bool:
        """Wait until one of the descriptors is ready and handle it. Returns False if the agent has exited."""
        readable, _, _ = select.select(watched, [], [], seconds)
        # Check first whether the rank has exited, because a signal from mpiexec after that did not end it.
        if self._wake in readable:
            os.read(self._wake, 512)
            return True
        if self._front in readable:
            numbers = os.read(self._front, 64)
            self._front_gone = not numbers
            self._mpiexec_sent_sigterm |= signal.SIGTERM in numbers
            # Send the signals immediately: a rank in MPI_Abort expects to be killed, and may otherwise
            # continue as if nothing had happened.
            for number in numbers or [signal.SIGKILL]:
                self._send(number)
        if self._channel.sock.fileno() not in readable:
            return True
        messages, _, alive = self._channel.receive()
        for message in messages:
            self._stay = message.get("stay", 0.0 if "over" in message else self._stay)
            time.sleep(message.get("after", 0.0))
            number = message.get("signal", 0)  # 0 means no signal
            # Do not send this signal if an earlier one has already asked the rank to exit, because it may be
            # saving. SIGHUP does not count, because Open MPI installs a handler for it that does nothing.
            same = (signal.SIGTERM, signal.SIGINT) if number in _ENDING else (number,)
            if time.monotonic() - max(self._had.pop(other, 0.0) for other in same) > _SAME_S:
                self._send(number)
        return alive


def main(arguments: list[str]) -> None:
    """Run a rank. ``arguments``: candidate base directories (separated by colons), job ID, command."""
    named, job, command = arguments[0], arguments[1], arguments[2:]
    linux.die_with_parent()
    if os.getppid() == 1:  # mpiexec died before die_with_parent() took effect
        os._exit(1)
    try:
        command = paths.enter(os.environ, command)
    except OSError as error:
        sys.exit(f"ringdance: {error.filename} on {os.uname().nodename}: {error.strerror}")
    # The path of the job's directory may differ between hosts. Find the one created by this host's agent.
    directories = [host_directory(base, job) for base in (*named.split(os.pathsep), *bases(os.environ))]
    os.environ[DIRECTORY] = next(filter(is_own, directories), os.devnull)
    # Open MPI forwards its variables from host to host, but the path in shared memory differs.
    for name in [name for name, value in os.environ.items() if value == SHARED]:
        os.environ[name] = host_shared(job)
    path = os.path.join(os.environ[DIRECTORY], "s")
    read, write = os.pipe()
    mpiexec, awaited = os.getppid(), {*_FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # See Note [Signals to all processes]
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)
        os.close(write)
        try:
            channel = Channel.connect(path)
        except OSError:  # the agent has exited
            os._exit(1)
        os._exit(_Supervisor(channel, read).run(command))
    ended = 0
    while not ended:
        came = signal.sigwaitinfo(awaited)
        if came.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(supervisor, os.WNOHANG)
        elif came.si_pid == mpiexec:
            os.write(write, bytes([came.si_signo]))
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
