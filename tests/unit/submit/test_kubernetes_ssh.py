"""The launcher's ssh and a worker's sshd with the rights of their pods: no root and no capabilities.

A pod's files replace those in /etc and /home in a separate mount namespace: the image's ssh configuration
from docker/, and the directory with the key as the operators mount it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ringdance.submit.kubernetes.manifest import SSH_DIRECTORY, SSH_PORT, sshd

ROOT = Path(__file__).resolve().parents[3]
AS_POD = (
    "setpriv --reuid 1000 --regid 1000 --clear-groups --no-new-privs --bounding-set -all "
    "timeout 40 env HOME=/home/mpiuser"
)
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SETUP = """
set -eu
cd "$1"
cp /etc/passwd passwd; sed -i '/:1000:/d' passwd; echo mpiuser:x:1000:1000::/home/mpiuser:/bin/sh >>passwd
mount --bind passwd /etc/passwd
mount -t tmpfs none /home; mkdir -p {directory}
mkdir -p /etc/ssh/ssh_config.d; mount -t tmpfs none /etc/ssh/ssh_config.d
cp {root}/docker/ssh_config /etc/ssh/ssh_config.d/ringdance.conf
mount -t tmpfs none /usr/local/bin; install -m 755 {root}/docker/job-host-key /usr/local/bin/
ssh-keygen -q -t ecdsa -b 521 -N '' -C '' -f {directory}/id_rsa
cp {directory}/id_rsa.pub {directory}/authorized_keys
chown -R 0:1000 {directory}; chmod {mode} {directory}/*
chown 1000:1000 /home/mpiuser
"""


def can_mount() -> bool:
    tools = all(shutil.which(name) for name in ("unshare", "setpriv", "ssh", "ssh-keygen"))
    if os.getuid() or not tools or not os.path.exists("/usr/sbin/sshd"):
        return False
    return (
        subprocess.run(["unshare", "-mnp", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]).returncode == 0
    )


def in_a_pod(directory: Path, mode: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with a pod's files in place. ``$SSHD`` starts the worker's daemon."""
    setup = SETUP.replace("{directory}", SSH_DIRECTORY).replace("{root}", str(ROOT)).replace("{mode}", mode)
    start = f"{AS_POD} {shlex.join(sshd())} 2>sshd.log &\n"
    # The daemon may need a moment, and the test must not wait forever.
    ready = (
        f"for i in $(seq 100); do (: </dev/tcp/127.0.0.1/{SSH_PORT}) 2>/dev/null && break; sleep 0.1; done\n"
    )
    return subprocess.run(
        [*NAMESPACES, "bash", "-c", setup + start + ready + script, "bash", directory],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["0640", "0644"], ids=["TrainJob", "MPIJob"])
def test_the_launcher_reaches_a_worker(tmp_path: Path, mode: str) -> None:
    if not can_mount():
        pytest.skip("needs root, unshare, setpriv, ssh and sshd")
    done = in_a_pod(tmp_path, mode, f"{AS_POD} ssh localhost 'echo it is; id -u'")
    log = (tmp_path / "sshd.log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert done.stdout == "it is\n1000\n"


def test_a_host_that_is_none_of_the_job_is_refused(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs root, unshare, setpriv, ssh and sshd")
    other = f"ssh-keygen -q -t ecdsa -N '' -f other; mv other.pub {SSH_DIRECTORY}/id_rsa.pub; "
    done = in_a_pod(tmp_path, "0644", other + f"{AS_POD} ssh localhost echo reached")
    assert done.returncode == 255
    assert "reached" not in done.stdout
    assert "HOST IDENTIFICATION HAS CHANGED" in done.stderr or "verification failed" in done.stderr


def test_the_image_knows_the_same_port_and_directory() -> None:
    assert f"Port {SSH_PORT}\n" in (ROOT / "docker" / "ssh_config").read_text()
    assert f" {SSH_DIRECTORY}\n" in (ROOT / "docker" / "Dockerfile").read_text()


def test_what_the_dockerfile_copies_exists() -> None:
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            words = [word for word in line.split()[1:-1] if not word.startswith("--")]
            assert words
            for word in words:
                assert (ROOT / word).exists(), word
