"""Start an agent on each host, and report all problems together."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import PIPE
from typing import IO, Any

from ringdance.errors import LaunchError
from ringdance.host.agent.paths import bare_command, module_line, package_directory
from ringdance.host.limits import raise_open_files
from ringdance.host.messages import AGENT_SPEAKS, Frames
from ringdance.host.system import machine
from ringdance.host.system.signals import STOPPING
from ringdance.launch.hosts import HostFacts, counted, facts_from, several
from ringdance.launch.remote.shell import SSH_ADVICE, RemoteShell

_AGAIN_S = 1.0  # pause between attempts to reach a host that may still be starting
_TOLD_S = 5.0
_SOON_S = 0.02
PIPES = 3
"""Number of file descriptors needed for each host."""

_OTHER_FILES = 64  # number of descriptors for everything else in this process
_starting = threading.Lock()  # one start at a time, because a start briefly needs more descriptors


@dataclass
class Remote:
    """A host with an agent, and the connection to the agent.

    Attributes:
        host: Name of the host as given by the user.
        frames: The connection to the agent.
        files: Files that are closed to end the connection.
        process: The ssh or srun process that reaches the agent, or the local agent itself. None if the agent
            connected over a socket.
        facts: Facts about the host.
        heard: Time of the agent's last message (``time.monotonic()``).
        errors: Output of ``process`` on stderr.
        local: True if this is the launcher's own host.
        silent: True if the user has been told that the host is silent.
        started: True if the agent was asked to start a program.
        ready: True if the agent has prepared the job.
        problem: Reason why the agent could not prepare the job, if any.
        port: A port that the agent has reserved.
        clean: True if the agent has cleaned up after the job.
        lost: True if the agent has exited or does not answer.
        behind: Upper bound, in seconds, on how far the host's clock is behind this host's clock.
    """

    host: str
    frames: Frames
    files: Sequence[IO[bytes] | socket.socket]
    process: subprocess.Popen[bytes] | None = None
    facts: HostFacts = field(default_factory=HostFacts)
    heard: float = field(default_factory=time.monotonic)
    errors: bytearray = field(default_factory=bytearray)
    local: bool = False
    silent: bool = False
    started: bool = False
    ready: bool = False
    problem: str = ""
    port: int = 0
    clean: bool = False
    lost: bool = False
    behind: float = math.inf

    def time_here(self, when: float) -> float:
        """Convert a time from the other host's clock to this host's clock.

        The message that contains the time must have just arrived. The offset is taken from the message with
        the shortest delay so far.
        """
        self.behind = min(self.behind, 0.0 if self.local else time.time() - when)
        return when + self.behind

    @property
    def there(self) -> bool:
        """True while the agent is still serving the job."""
        return not (self.lost or self.clean)

    def disconnect(self) -> None:
        """Close the connection. The agent then exits."""
        for file in self.files:
            file.close()

    def close(self, timeout: float = 2.0) -> None:
        """Close the connection, and kill the process if it does not exit in time."""
        self.disconnect()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> int:
        """Kill the process if it is still running. Return its exit code."""
        if self.process:
            self.process.kill()
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to exit. Return its exit code.

        Raises:
            subprocess.TimeoutExpired: The process is still running.
        """
        return self.process.wait(timeout) if self.process else 0

    def last_words(self) -> str:
        """Return the last line that the process has written to stderr."""
        if self.process and self.process.stderr:
            with contextlib.suppress(OSError):
                self.errors += os.read(self.process.stderr.fileno(), 65536)
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def close_all(remotes: Iterable[Remote]) -> None:
    """End several agents in parallel."""
    remotes = list(remotes)
    for remote in remotes:
        remote.disconnect()
    for remote in remotes:
        remote.close()


class _Problem(LaunchError):
    def __init__(self, problem: str, fix: str = "", temporary: bool = False) -> None:
        super().__init__(problem, fix)
        self.temporary = temporary


def connect(
    hosts: Iterable[str], shell: RemoteShell, timeout: float, log: Callable[[str], None] = lambda text: None
) -> list[Remote]:
    """Start an agent on each of ``hosts``, in parallel.

    Args:
        hosts: Names of the hosts.
        shell: How to reach the hosts.
        timeout: Seconds within which each host must answer.
        log: Called periodically with a message about the hosts that have not answered yet.

    Raises:
        LaunchError: Some hosts cannot be used. The message lists these hosts and their problems. No agent is
            left running.
    """
    hosts = list(hosts)
    agents, problems = attempt(hosts, shell, timeout, log)
    if problems:
        close_all(agents.values())
        raise LaunchError(together({host: str(problems[host]) for host in hosts if host in problems}))
    return [agents[host] for host in hosts]


def attempt(
    hosts: Sequence[str], shell: RemoteShell, timeout: float, log: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Remote], dict[str, LaunchError]]:
    """Start agents as ``connect()`` does. Return the agents that answer, and the other hosts' problems."""
    allow_open_files(PIPES * len(hosts), counted(len(hosts), "host"))
    agents: dict[str, Remote] = {}
    problems: dict[str, LaunchError] = {}
    started: list[Remote] = []
    interrupted = threading.Event()
    until = time.monotonic() + max(timeout, shell.start_timeout)

    def one(host: str) -> None:
        while not interrupted.is_set():
            try:
                left = min(timeout, max(1.0, until - time.monotonic()))
                agents[host] = _connect(host, shell, left, started)
                return
            except LaunchError as problem:
                again = getattr(problem, "temporary", False) and shell.start_timeout
                if not again or time.monotonic() + _AGAIN_S > until:
                    problems[host] = problem
                    return
            interrupted.wait(_AGAIN_S)

    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_TOLD_S)
                missing = [host for host in hosts if host not in agents and host not in problems]
                if thread.is_alive() and missing:
                    left = max(0.0, until - time.monotonic())
                    log(f"waiting up to {left:.0f} s more for {several(missing)}")
    except BaseException:  # on Ctrl-C, an ssh process for a host that hangs would otherwise keep running
        interrupted.set()
        while any(thread.is_alive() for thread in threads):
            for remote in list(started):
                remote.kill()
            time.sleep(_SOON_S)
        close_all(agents.values())
        raise
    # Check hosts in the given order: if two names refer to one machine, the second is reported.
    problems |= _unfit(agents[host] for host in hosts if host in agents and host not in shell.local)
    return agents, problems


def allow_open_files(more: int, what: str) -> None:
    """Raise this process's limit on open files if needed. Its child processes inherit the limit.

    Args:
        more: Number of file descriptors needed in addition to those already open.
        what: What the descriptors are needed for, for the error message.

    Raises:
        LaunchError: The hard limit is too low.
    """
    needed = len(os.listdir("/dev/fd")) + more + _OTHER_FILES
    limit = raise_open_files(needed)
    if limit < needed:
        raise LaunchError(
            f"this process needs {needed} open files for {what}, but its hard limit is {limit} (ulimit -Hn). "
            f"Raise the limit as root (prlimit --nofile={needed} --pid PID-OF-THE-SHELL), or use fewer hosts."
        )


def folded(problems: Mapping[str, str]) -> list[str]:
    """Format the problems as lines, one for each distinct problem with all hosts that have it."""
    groups: dict[str, list[str]] = {}
    for host, problem in problems.items():
        groups.setdefault(problem, []).append(host)
    return [f"host{'s' * (len(names) > 1)} {several(names)}: {problem}" for problem, names in groups.items()]


def together(problems: Mapping[str, str]) -> str:
    """Combine the problems of all hosts into one message."""
    lines = folded(problems)
    return "\n  ".join(["Cannot start:", *lines]) if lines[1:] else lines[0]


def _connect(host: str, shell: RemoteShell, timeout: float, started: list[Remote]) -> Remote:
    python = "" if host in shell.local else shell.python
    command = shell.command(host, module_line(python, "agent.main") if python else bare_command("agent.main"))
    try:
        remote = _start(host, command, env=shell.environ)
        started.append(remote)
    except OSError as error:
        raise _Problem(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        if not _await_facts(remote, timeout):
            raise _why(remote, command[0], python)
    except BaseException:
        remote.kill()
        remote.close()
        raise
    return remote


def _await_facts(remote: Remote, timeout: float) -> bool:
    """Wait for an agent's first message. Returns False if the connection ends first."""
    until, alive = time.monotonic() + timeout, True
    while alive:
        left = until - time.monotonic()
        if left <= 0:
            words = remote.last_words() or remote.frames.preamble.decode(errors="replace").strip()
            text = f"no answer within {timeout:.0f} s" + (f" ({words})" if words else "")
            raise _Problem(text, temporary=True)
        poll = select.poll()
        poll.register(remote.frames.read_fd, select.POLLIN)
        poll.poll(left * 1000)
        messages, alive = remote.frames.receive()
        for message, _ in messages:
            remote.facts = facts_from(message["facts"])
            return True
    return False


def adopt(host: str, sock: socket.socket, timeout: float = 30.0) -> Remote:
    """Return the ``Remote`` for an agent that has connected over a socket.

    Raises:
        LaunchError: The agent does not answer.
    """
    files = (sock, sock.dup())  # two descriptors, because each is watched for one direction
    remote = Remote(host, Frames(files[0].fileno(), files[1].fileno(), after=AGENT_SPEAKS), files)
    with contextlib.suppress(_Problem):
        if _await_facts(remote, timeout):
            return remote
    remote.close()
    raise LaunchError(f"The agent on host {host} does not answer.")


def _start(host: str, command: Sequence[str], **options: Any) -> Remote:
    """Start an agent, or the ssh or srun that starts it. ``options`` are passed to ``subprocess.Popen``."""
    with _starting:
        # Only the launcher handles signals that end the job. It notifies the agents with messages. If a
        # scheduler's signal to all processes ended an ssh process, the ranks on its host would be killed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING if command[0] == "ssh" else ())
        try:
            process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, **options
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    os.set_blocking(process.stderr.fileno(), False)
    frames = Frames(process.stdout.fileno(), process.stdin.fileno(), after=AGENT_SPEAKS)
    return Remote(host, frames, (process.stdin, process.stdout, process.stderr), process)


def start_local(host: str, environ: Mapping[str, str], stdin: int, remotes: Sequence[Remote]) -> Remote:
    """Start this host's agent, which also sends heartbeats to the other agents.

    Args:
        host: Name of this host in the plan.
        environ: Environment for the agent and all processes that it starts.
        stdin: File descriptor for rank 0's standard input if rank 0 runs on this host, -1 for none.
        remotes: The agents on other hosts.

    Raises:
        OSError: The agent cannot be started.
    """
    # Keep the lock file in memory, where no network file system can block. This needs Linux, as do all jobs
    # on several hosts.
    lock = os.memfd_create("ringdance-lock") if remotes else -1
    for number, remote in enumerate(remotes):
        remote.frames.shared = lock, number
    own = os.dup(stdin) if stdin >= 0 else -1  # because the agent uses descriptor 0 itself
    passed = [own, lock, *(remote.frames.write_fd for remote in remotes)]
    try:
        command = bare_command("agent.main", *map(str, passed))
        remote = _start(host, command, env=environ, pass_fds=[fd for fd in passed if fd >= 0])
        remote.local = True
        with contextlib.suppress(OSError, AttributeError):  # enlarge the pipe if the system allows it
            fcntl.fcntl(remote.frames.read_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        return remote
    finally:
        if own >= 0:
            os.close(own)


def _why(remote: Remote, program: str, python: str) -> _Problem:
    """Explain why an ssh process exited without reaching an agent."""
    try:
        code: int | None = remote.wait(5.0)
    except subprocess.TimeoutExpired:
        code = None
    error = remote.last_words()
    here = python or machine.facts()["executable"]
    if code in (126, 127):
        return _Problem(
            f"{here} does not exist on that host ({error})", "If its path differs there, pass --python PATH"
        )
    if "ModuleNotFoundError" in error and (python or "'host'" in error):
        where = "" if python else f" in {package_directory()}"
        return _Problem(f"{here} there has no ringdance{where}", "Install it there in the same way as here")
    if program == "ssh" and code == 255:
        output = remote.errors.decode(errors="replace")
        known = (f"{problem}: {fix}" for pattern, problem, fix in SSH_ADVICE if re.search(pattern, output))
        advice = next(known, "try: ssh HOST true")
        return _Problem(
            f"ssh cannot connect: {error.rstrip('.') or 'no message'}", advice.replace("HOST", remote.host),
            temporary="Permission denied" not in error and "verification failed" not in error,
        )
    ended = "has closed its output, but is still running" if code is None else f"exited with code {code}"
    return _Problem(f"{program} {ended}: {error or 'no message'}", temporary=True)


def _unfit(remotes: Iterable[Remote]) -> dict[str, LaunchError]:
    """Return the hosts that cannot be used together with this host or with each other, and the reasons."""
    here = facts_from(machine.facts())
    problems: dict[str, LaunchError] = {}
    seen = {here.identity: "this machine"}
    for remote in remotes:
        facts = remote.facts
        if facts.version != here.version:
            problems[remote.host] = LaunchError(
                f"it has ringdance {facts.version}, but this machine has {here.version}",
                "Install the same version on all hosts",
            )
        elif facts.python.split(".")[:2] != here.python.split(".")[:2]:
            problems[remote.host] = LaunchError(
                f"{facts.executable} is Python {facts.python} there, but {here.python} here",
                "Use the same Python version on all hosts",
            )
        elif facts.identity in seen:
            problems[remote.host] = LaunchError(
                f"it is {seen[facts.identity]} by another name", "Name each machine once, with all its slots"
            )
        seen.setdefault(facts.identity, f"host {remote.host}")
    return problems
