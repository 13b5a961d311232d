"""Slurm on simulated hosts: munge and slurmd on each, slurmctld on the first."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path

from hosts import Hosts, wait_until

_CONF = """\
ClusterName=simulated
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmdParameters=config_overrides
TmpFS=/run/tmp
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
GresTypes=gpu
NodeName={names} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str:
    """Return why Slurm cannot run here ("" if it can), in addition to the hosts' requirements."""
    programs = ("munged", "slurmctld", "slurmd", "srun")
    missing = [name for name in programs if not shutil.which(name, path="/usr/sbin:/usr/bin")]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else ""


class Slurm:
    """A cluster of all `hosts`. It ends with them.

    Args:
        hosts: Hosts of the cluster.
        directory: Directory for settings, state and logs. It must not exist yet.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.environ = {"SLURM_CONF": str(directory / "slurm.conf")}
        (directory / "state").mkdir(parents=True)
        names = ",".join(hosts.names)
        text = _CONF.format(directory=directory, first=hosts.names[0], names=names)
        (directory / "slurm.conf").write_text(text)
        # Two devices that no program opens.
        (directory / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (directory / "cgroup.conf").write_text("ConstrainCores=no\n")
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for name in hosts.names:
            self._start(name, "mkdir", "-p", "/run/munge", "/run/slurmd")
            own = [f"--{what}=/run/munge/{what}" for what in ("pid-file", "log-file", "seed-file")]
            socket = "--socket=/run/munge/munge.socket.2"
            self._start(name, "/usr/sbin/munged", "--force", f"--key-file={key}", socket, *own)
        self._start(hosts.names[0], "/usr/sbin/slurmctld")
        for name in hosts.names:
            self._start(name, "/usr/sbin/slurmd", "-N", name)
        if wait_until(lambda: self._idle() == len(hosts.names), 60.0) is None:
            raise RuntimeError(f"Slurm does not come up: {self.run('sinfo').stdout}")
        self._own = {pid for name in hosts.names for pid in hosts.processes(name)}

    def _start(self, host: str, *command: str) -> None:
        """Run a command that exits, or moves itself to the background."""
        with open(self.directory / f"{host}.out", "ab") as log:  # a daemon would hold a pipe open
            line = ["env", *(f"{name}={value}" for name, value in self.environ.items()), *command]
            subprocess.run(
                self.hosts.line(host, *line),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=30.0,
                start_new_session=True,
            )

    def _idle(self) -> int:
        counts = self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.split()
        return sum(int(count) for count in counts)

    def run(self, *command: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end on the first host, as a user of the cluster."""
        return self.hosts.run(self.hosts.names[0], *command, timeout=timeout, env=self.environ)

    def leftovers(self) -> list[str]:
        """Describe what jobs have left on the hosts."""
        lines = [line for name in self.hosts.names for line in self.hosts.leftovers(name)]
        return [line for line in lines if not any(f": process {pid}: " in line for pid in self._own)]
