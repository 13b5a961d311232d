"""Simulated hosts as the pods of an MPIJob (v2beta1) or TrainJob: the launcher is h1, the others are workers.

The operator is simulated according to its documentation and source: names that exist only with the job's
domain, a host file in /etc/mpi, and variables in the launcher's pod. Each pod has its own /etc.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hosts import Hosts

DOMAIN = {"MPIJob": "pi.default.svc", "TrainJob": "pi"}

_OWN_ETC = """set -eu
mkdir -p /run/etc/upper /run/etc/work /run/bin/upper /run/bin/work
cat /etc/hosts >/run/hosts
mount -t overlay etc -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
mount --bind {names} /etc/hosts
mkdir -p /etc/mpi; cp {hostfile} /etc/mpi/hostfile
"""
# The image: docker/Dockerfile's user and ssh client, and the job's key, mounted as by the operator.
_OUR_IMAGE = """set -eu
mount -t overlay bin -o lowerdir=/usr/local/bin,upperdir=/run/bin/upper,workdir=/run/bin/work /usr/local/bin
install -m 755 {root}/docker/job-host-key /usr/local/bin/
sed -i /:1000:/d /etc/passwd; echo mpiuser:x:1000:1000::/home/mpiuser:/bin/bash >>/etc/passwd
mkdir -p /etc/ssh/ssh_config.d; rm -f /etc/ssh/ssh_config.d/*
install -m 644 {root}/docker/ssh_config /etc/ssh/ssh_config.d/ringdance.conf
grep -qs '^Include' /etc/ssh/ssh_config || echo 'Include /etc/ssh/ssh_config.d/*.conf' >/etc/ssh/ssh_config
mount -t tmpfs none /home; mkdir -p {directory}; chown 1000:1000 /home/mpiuser
case {python} in /root/*)  # an interpreter that only root can reach would be elsewhere in an image
    mkdir -m 755 /run/root; mkdir -p /run{python}; mount --bind {python} /run{python}
    mount --rbind /run/root /root ;;
esac
install -g 1000 -m 640 {key} {directory}/id_rsa; install -m 644 {key}.pub {directory}/id_rsa.pub
install -m 644 {key}.pub {directory}/authorized_keys
"""
_RIGHTS = ["--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]


class Pods:
    """The pods of a job.

    Args:
        directory: Directory for keys and settings.
        workers: Number of workers.
        slots: Ranks on each worker.
        kind: "MPIJob" or "TrainJob".
    """

    def __init__(self, directory: Path, workers: int, slots: int, kind: str = "MPIJob") -> None:
        self.directory, self.kind = directory, kind
        self.hosts = Hosts(directory / "net", workers + 1, domain=DOMAIN[kind])
        self.workers = self.hosts.names[1:]
        self._names = directory / "net" / "hosts"
        hostfile = directory / "hostfile"
        hostfile.write_text("".join(f"{name}.{DOMAIN[kind]} slots={slots}\n" for name in self.workers))
        self.environ = {
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }
        if kind == "MPIJob":
            self.environ |= {
                "K_MPI_JOB_ROLE": "launcher",
                "OMPI_MCA_orte_set_default_slots": str(slots),
                "NVIDIA_VISIBLE_DEVICES": "",
                "NVIDIA_DRIVER_CAPABILITIES": "",
            }
        for name in self.hosts.names:
            self.do(name, _OWN_ETC.format(names=self._names, hostfile=hostfile))

    def do(self, name: str, script: str) -> None:
        """Run a script in a pod as root."""
        done = self.hosts.run(name, "sh", "-c", script)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")

    def know_workers(self, known: bool) -> None:
        """Make the workers' names exist or vanish. In a cluster, they appear a while after the pods start."""
        lines = self._names.read_text().splitlines()
        kept = [line.removeprefix("#") for line in lines]
        hidden = [line if known or line.split()[0] == "127.0.0.1" else f"#{line}" for line in kept]
        self._names.write_text("\n".join(hidden) + "\n")  # in place, because it is mounted

    def use_our_image(self, root: Path, directory: str) -> None:
        """Make the pods look like docker/Dockerfile's image, with the job's key pair in `directory`."""
        key = self.directory / "net/ssh/id_ed25519"
        for name in self.hosts.names:
            self.do(name, _OUR_IMAGE.format(root=root, directory=directory, key=key, python=sys.base_prefix))

    def as_container(self, *command: str) -> list[str]:
        """Return a command line with the user and rights of a restricted pod's container."""
        home = ["env", "HOME=/home/mpiuser", "USER=mpiuser"]
        return ["setpriv", *_RIGHTS, *home, "sh", "-c", f"cd /home/mpiuser; exec {shlex.join(command)}"]

    def down(self) -> None:
        """Stop all pods."""
        self.hosts.down()
