"""Start an agent on each host, and report all problems at once."""

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
from ringdance.launch.hosts import HostFacts, facts_from, several
from ringdance.launch.remote.shell import SSH_ADVICE, RemoteShell

_AGAIN_S = 1.0  # between two attempts to reach a host that may still be starting
_TOLD_S = 5.0
_SOON_S = 0.02
PIPES = 3
"""Descriptors for each host."""

_OTHER_FILES = 64  # for what else this process does
_starting = threading.Lock()  # a start needs some more descriptors for a moment


@dataclass
class Remote:
    """A host with an agent.

    Attributes:
        host: its name as given.
        frames: the connection.
        files: what to close to end it.
        process: the ssh (or srun) that leads to it, or the agent itself; None if it is connected otherwise.
        facts: what the host is.
        heard: when its last message came (monotonic seconds).
        errors: what that process wrote on stderr.
        local: whether the host is the launcher's own.
        silent: whether its silence has been shown.
        started: whether a program was to be started there.
        ready: whether it has prepared itself for the job.
        problem: what has kept it from that, or "".
        port: one that it keeps free.
        clean: whether it has cleaned up after the job.
        lost: whether it has ended, or does not answer.
        behind: seconds by which its clock is behind this host's, at most.
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
        """Return by this host's clock what a message that has come says by its host's: clocks differ.

        The message that was quickest to come tells how much.
        """
        self.behind = min(self.behind, 0.0 if self.local else time.time() - when)
        return when + self.behind

    @property
    def there(self) -> bool:
        """Whether it still serves the job."""
        return not (self.lost or self.clean)

    def disconnect(self) -> None:
        """End the connection, which ends the agent."""
        for file in self.files:
            file.close()

    def close(self, timeout: float = 2.0) -> None:
        """End the connection; kill the process if it has not ended in time."""
        self.disconnect()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> int:
        """Kill the process if it has not ended; return its exit code."""
        if self.process:
            self.process.kill()
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        return self.process.wait(timeout) if self.process else 0

    def last_words(self) -> str:
        """Return the last line that the process wrote on stderr."""
        try:
            if self.process and self.process.stderr:
                self.errors += os.read(self.process.stderr.fileno(), 65536)
        except OSError:
            pass
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def close_all(remotes: Iterable[Remote]) -> None:
    """End agents, all at once."""
    remotes = list(remotes)
    for remote in remotes:
        remote.disconnect()
    for remote in remotes:
        remote.close()


class _Problem(LaunchError):
    def __init__(self, text: str, temporary: bool = False) -> None:
        super().__init__(text)
        self.temporary = temporary


def connect(
    hosts: Iterable[str], shell: RemoteShell, timeout: float, log: Callable[[str], None] = lambda text: None
) -> list[Remote]:
    """Start an agent on each of `hosts`, all at once.

    Args:
        hosts: their names.
        shell: how to get there.
        timeout: seconds for a host to answer.
        log: is called now and then with the hosts that are still waited for.

    Raises:
        LaunchError: a host cannot be used; names each with what is wrong. No agent is left.
    """
    hosts = list(hosts)
    found, problems = attempt(hosts, shell, timeout, log)
    if problems:
        close_all(found.values())
        raise LaunchError(together({host: problems[host] for host in hosts if host in problems}))
    return [found[host] for host in hosts]


def attempt(
    hosts: Sequence[str], shell: RemoteShell, timeout: float, log: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Remote], dict[str, str]]:
    """Start agents as :func:`connect`; return those that answer, and the problems of the others."""
    allow_open_files(PIPES * len(hosts), f"{len(hosts)} hosts")
    found: dict[str, Remote] = {}
    problems: dict[str, str] = {}
    started: list[Remote] = []
    interrupted = threading.Event()
    until = time.monotonic() + max(timeout, shell.start_timeout)

    def one(host: str) -> None:
        while True:
            try:
                left = min(timeout, max(1.0, until - time.monotonic()))
                found[host] = _connect(host, shell, left, started)
                return
            except LaunchError as problem:
                again = getattr(problem, "temporary", False) and shell.start_timeout
                if not again or time.monotonic() + _AGAIN_S > until:
                    problems[host] = str(problem)
                    return
            if interrupted.wait(_AGAIN_S):
                return

    threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_TOLD_S)
                missing = [host for host in hosts if host not in found and host not in problems]
                if thread.is_alive() and missing:
                    left = max(0.0, until - time.monotonic())
                    log(f"waiting for {several(missing)}, {left:.0f} s more")
    except BaseException:  # Ctrl-C: the ssh to a host that hangs would stay
        interrupted.set()
        while any(thread.is_alive() for thread in threads):
            for remote in list(started):
                remote.kill()
            time.sleep(_SOON_S)
        close_all(found.values())
        raise
    # In the order given: of two names of one machine the later is the wrong one.
    problems |= _unfit(found[host] for host in hosts if host in found and host not in shell.local)
    return found, problems


def allow_open_files(more: int, what: str) -> None:
    """Raise this process's limit of open files, which what it starts here inherits, if that is needed.

    Args:
        more: descriptors beyond those that are open.
        what: needs them.

    Raises:
        LaunchError: the hard limit does not allow as many.
    """
    needed = len(os.listdir("/dev/fd")) + more + _OTHER_FILES
    limit = raise_open_files(needed)
    if limit < needed:
        raise LaunchError(
            f"{what} need {needed} open files in this process, and its hard limit is {limit} (ulimit -Hn): "
            f"raise it, as root: prlimit --nofile={needed} --pid PID-OF-THE-SHELL; or use fewer hosts"
        )


def folded(problems: Mapping[str, str]) -> list[str]:
    """Return problems of hosts as some lines: one for hosts that have the same."""
    groups: dict[str, list[str]] = {}
    for host, problem in problems.items():
        groups.setdefault(problem, []).append(host)
    return [f"host{'s' * (len(names) > 1)} {several(names)}: {problem}" for problem, names in groups.items()]


def together(problems: Mapping[str, str]) -> str:
    """Return all problems of hosts as one message."""
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
    """Wait for an agent's first message; return False if the connection ends before."""
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
    """Return the agent that has connected over a socket.

    Raises:
        LaunchError: it does not answer.
    """
    files = (sock, sock.dup())  # two descriptors: each is watched for one direction
    remote = Remote(host, Frames(files[0].fileno(), files[1].fileno(), after=AGENT_SPEAKS), files)
    with contextlib.suppress(_Problem):
        if _await_facts(remote, timeout):
            return remote
    remote.close()
    raise LaunchError(f"host {host}: its agent does not answer")


def _start(host: str, command: Sequence[str], **options: Any) -> Remote:
    """Start the program that is, or leads to, an agent; `options` as of ``subprocess.Popen``."""
    with _starting:
        # Signals to end are the launcher's: what it does about them reaches the agents as a message. An ssh
        # that a scheduler's signal to all processes ended would end the ranks of its host.
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
    """Start the agent of this host, which also sends heartbeats to the others.

    Args:
        host: its name in the plan.
        environ: of the agent, and of all that it starts.
        stdin: what rank 0 reads if it runs here, -1 for nothing.
        remotes: the agents on other hosts.

    Raises:
        OSError: it cannot be started.
    """
    # In memory: no network file system can block it. Several hosts are Linux hosts.
    lock = os.memfd_create("ringdance-lock") if remotes else -1
    for number, remote in enumerate(remotes):
        remote.frames.shared = lock, number
    passed = [stdin, lock, *(remote.frames.write_fd for remote in remotes)]
    if stdin >= 0:
        passed[0] = os.dup(stdin)  # 0 is the agent's own
    try:
        command = bare_command("agent.main", *map(str, passed))
        remote = _start(host, command, env=environ, pass_fds=[fd for fd in passed if fd >= 0])
        remote.local = True
        with contextlib.suppress(OSError, AttributeError):  # output in larger chunks, where that is possible
            fcntl.fcntl(remote.frames.read_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        return remote
    finally:
        if stdin >= 0:
            os.close(passed[0])


def _why(remote: Remote, program: str, python: str) -> _Problem:
    """Explain the end of an ssh that reached no agent."""
    try:
        code = remote.wait(5.0)
    except subprocess.TimeoutExpired:
        code = -1
    error = remote.last_words()
    here = python or machine.facts()["executable"]
    if code in (126, 127):
        return _Problem(
            f"there is no {here} ({error}). "
            "Is the Python environment of that host somewhere else? Say where: --python PATH"
        )
    if "ModuleNotFoundError" in error and (python or "'host'" in error):
        where = "" if python else f" in {package_directory()}"
        return _Problem(f"{here} there has no ringdance{where}. Install it as it is installed here")
    if program == "ssh" and code == 255:
        said = remote.errors.decode(errors="replace")
        known = (f"{problem}: {fix}" for pattern, problem, fix in SSH_ADVICE if re.search(pattern, said))
        advice = next(known, "try: ssh HOST true")
        return _Problem(
            f"ssh cannot connect: {error.rstrip('.') or 'no message'}. {advice.replace('HOST', remote.host)}",
            temporary="Permission denied" not in error and "verification failed" not in error,
        )
    return _Problem(f"{program} ended with exit code {code}: {error}", temporary=True)


def _unfit(remotes: Iterable[Remote]) -> dict[str, str]:
    """Return hosts that cannot be used together with this one and the others, with the reason."""
    here = facts_from(machine.facts())
    problems: dict[str, str] = {}
    seen = {here.identity: "this machine"}
    for remote in remotes:
        facts = remote.facts
        if facts.version != here.version:
            problems[remote.host] = (
                f"it has ringdance {facts.version}, this machine {here.version}. "
                "Install the same version on all"
            )
        elif facts.python.split(".")[:2] != here.python.split(".")[:2]:
            problems[remote.host] = (
                f"{facts.executable} is Python {facts.python} there, {here.python} here. "
                "All hosts need the same"
            )
        elif facts.identity in seen:
            problems[remote.host] = (
                f"it is {seen[facts.identity]} by another name. Name each machine once, with all its slots"
            )
        seen.setdefault(facts.identity, f"host {remote.host}")
    return problems
