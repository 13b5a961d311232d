"""Command lines that start a program on another host: pure, and no shell finds more in them than words."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ringdance.cluster.hostfile import NAME
from ringdance.errors import LaunchError


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Attributes:
        way: "ssh", or "srun" for the hosts of a Slurm allocation.
        port: of ssh; 0 for what ssh's own settings say.
        identity: file with the key for ssh, or "".
        arguments: more arguments of ssh; they win over ours.
        patience: seconds in which hosts may still be starting (pods of a job).
        here: names of this machine, where a program is started without any of that.
    """

    way: str = "ssh"
    port: int = 0
    identity: str = ""
    arguments: Sequence[str] = ()
    patience: float = 0.0
    here: Collection[str] = ()

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """The command line that runs `program` on `host`.

        Raises:
            LaunchError: that is no host's name.
        """
        if not NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not the name of a host: letters, digits, dots and dashes")
        if host in self.here:
            return list(program)
        if self.way == "srun":
            return [
                "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mpi=none",
                "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=0", "--quiet", *program,
            ]  # fmt: skip
        line = ["ssh", "-x", "-T", *self.arguments]
        line += ["-p", str(self.port)] if self.port else []
        line += ["-i", self.identity] if self.identity else []
        # Never a question, never a changed key; the first -o of a name holds, so the user's come first.
        for option in (
            "BatchMode=yes",
            "StrictHostKeyChecking=accept-new",
            "ConnectTimeout=10",
            "LogLevel=ERROR",
        ):
            line += ["-o", option]
        return [*line, "--", host, shlex.join(program)]
