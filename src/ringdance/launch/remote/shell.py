"""How to reach other hosts: command-line options, and commands quoted for the remote shell."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ringdance.errors import LaunchError
from ringdance.host.schedulers import slurm
from ringdance.host.schedulers.hostfile import NAME, HostList, parse_hostfile, parse_hosts
from ringdance.host.system import linux

# Never prompt. ssh uses the first value given for each option, so the user's options precede these.
_SSH = ("BatchMode=yes", "ConnectTimeout=10", "LogLevel=ERROR")

SSH_ADVICE = (
    (
        "IDENTIFICATION HAS CHANGED",
        "its key has changed, because the host was reinstalled or another host is answering",
        "if the host was reinstalled, run ssh-keygen -R HOST",
    ),
    (
        "host key is known for", "its host key is unknown, and ssh is configured to refuse new keys",
        "verify the key, then add it: ssh-keyscan HOST >> ~/.ssh/known_hosts",
    ),
    (
        "Permission denied", "passwordless login fails",
        "run ssh-copy-id HOST, or pass a key with -i FILE (mode 600)",
    ),
    (
        "Could not resolve|Name or service not known", "its name does not resolve",
        "correct the name, or add it to /etc/hosts here (or to ~/.ssh/config)",
    ),
    (
        "Connection refused", "no sshd answers",
        "start sshd there (sudo systemctl start ssh), or pass its port with -p PORT",
    ),
    (
        "timed out", "it does not answer",
        "check that the host is up. For details, run ssh -v -o BatchMode=yes HOST true",
    ),
)  # fmt: skip
"""Each entry: a pattern for ssh's error message, the problem, and its fix. The first match applies."""


@dataclass(frozen=True)
class RemoteShell:
    """How to reach other hosts.

    Attributes:
        method: "ssh", or "srun" for the hosts of a Slurm allocation.
        port: Port for ssh, or 0 for the port in ssh's configuration.
        identity: Private key file for ssh, if any.
        arguments: Further arguments for ssh. They override our defaults.
        start_timeout: Seconds to keep trying hosts that may still be starting, such as pods.
        local: Names that refer to this machine, where programs are started directly.
        python: Path of the interpreter on other hosts, empty if it is the same as on this host.
    """

    method: str = "ssh"
    port: int = 0
    identity: str = ""
    arguments: Sequence[str] = ()
    start_timeout: float = 0.0
    local: Collection[str] = ()
    python: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """Environment in which to run the result of ``command()``."""
        hidden = slurm.of_a_step(os.environ)
        return {name: value for name, value in os.environ.items() if name not in hidden}

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """Return the command line that runs ``program`` on ``host``.

        Raises:
            LaunchError: The host's name is invalid.
        """
        if not NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not a valid host name", "Use letters, digits, dots and dashes")
        if host in self.local:
            return list(program)
        if self.method == "srun":
            return slurm.step(host, program, os.environ)
        own = ["-p", str(self.port)] if self.port else []
        own += ["-i", self.identity] if self.identity else []
        options = [*_SSH, *_of_new_hosts((*self.arguments, *own), host)]
        line = ["ssh", "-x", "-T", *self.arguments, *own]
        return [*line, *(word for each in options for word in ("-o", each)), "--", host, shlex.join(program)]


@cache
def _of_new_hosts(arguments: Sequence[str], host: str) -> Sequence[str]:
    """Return the option that makes ssh accept the key of a new host, unless ssh is configured otherwise."""
    output = linux.run(["ssh", *arguments, "-G", "--", host], 10)[1]
    return ("StrictHostKeyChecking=accept-new",) if "stricthostkeychecking ask" in output.split("\n") else ()


_HOW = ("ssh_port", "ssh_identity_file", "python", "ssh_args")


# ``parser`` is typed as Any, because argparse has no public name for the base class of parsers and groups.
def add_host_options(parser: Any, text: str = "hosts, and the number of slots on each") -> None:
    """Add -H, --hostfile and the options for ssh, which ``remote_shell_of()`` reads.

    Args:
        parser: An ``argparse.ArgumentParser``, or one of its groups.
        text: Help text for -H.
    """
    names, add = parser.add_mutually_exclusive_group(), parser.add_argument
    names.add_argument("-H", "--hosts", metavar="H1[:N],H2[:M]", help=text)
    names.add_argument("--hostfile", metavar="FILE", help="file with lines `HOST slots=N` or `HOST:N`")
    add("-p", "--ssh-port", type=int, default=0, metavar="N", help="port for ssh (default: as configured)")
    add("-i", "--ssh-identity-file", default="", metavar="FILE", help="private key for ssh")
    add("--python", default="", metavar="PATH", help="Python on other hosts (default: same path as here)")
    add("--ssh-args", default="", metavar="TEXT", help='more options for ssh, as in --ssh-args="-o User=me"')


def hosts_of(arguments: argparse.Namespace, slots: int = 1) -> HostList | None:
    """Return the hosts given by -H or --hostfile, or None if neither option is set.

    Args:
        arguments: The parsed options.
        slots: Number of slots for hosts given to -H without a number.

    Raises:
        LaunchError: A host name or a host file is invalid.
    """
    if arguments.hosts:
        return parse_hosts(arguments.hosts, slots)
    return parse_hostfile(arguments.hostfile) if arguments.hostfile else None


def ssh_words(arguments: argparse.Namespace) -> list[str]:
    """Convert the parsed options of ``add_host_options()`` to arguments for ``ringdance run``."""
    values = {name: getattr(arguments, name) for name in _HOW}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]


def remote_shell_of(arguments: argparse.Namespace, more: Sequence[str] = ()) -> RemoteShell:
    """Build the remote shell defined by the options that ``add_host_options()`` added.

    Args:
        arguments: The parsed options.
        more: Arguments for ssh, appended to the user's arguments.

    Raises:
        LaunchError: --ssh-args has an unclosed quote, or --python is not an absolute path.
    """
    try:
        words = shlex.split(arguments.ssh_args)
    except ValueError as error:
        raise LaunchError(f"--ssh-args={arguments.ssh_args!r} cannot be split into words: {error}") from None
    if arguments.python and not os.path.isabs(arguments.python):
        raise LaunchError(f"--python {arguments.python}: not an absolute path, such as /opt/env/bin/python")
    return RemoteShell(
        port=arguments.ssh_port, identity=arguments.ssh_identity_file, arguments=(*words, *more),
        python=arguments.python,
    )
