"""In the launcher pod of an MPIJob or TrainJob, no hosts are given: everything comes from the operator."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hosts
import pytest
from jobs import SAVES, TRAINING
from pods import DOMAIN, Pods

from ringdance.launch.mpi import find_mpi
from ringdance.submit.kubernetes.job import JobRequest
from ringdance.submit.kubernetes.manifest import SSH_DIRECTORY, UNTIL_RANKS_END, manifest

pytestmark = pytest.mark.limit(300)
ROOT = Path(__file__).resolve().parents[2]
BIN = os.path.dirname(sys.executable)
RANKS = [(rank, f"h{rank // 2 + 2}") for rank in range(4)]


@pytest.fixture(scope="module", params=["MPIJob", "TrainJob"])
def pods(request: pytest.FixtureRequest) -> Iterator[Pods]:
    reason = hosts.why_not() or ("" if shutil.which("setpriv") else "needs setpriv (util-linux)")
    if reason:
        pytest.skip(f"simulated pods: {reason}")
    with tempfile.TemporaryDirectory(prefix="rdp-") as directory:
        os.chmod(directory, 0o755)
        made = Pods(Path(directory), workers=2, slots=2, kind=request.param)
        try:
            yield made
        finally:
            made.down()


@pytest.fixture
def script(pods: Pods) -> str:
    path = pods.directory / "train.py"
    path.write_text(TRAINING)
    return str(path)


def launch(pods: Pods, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return pods.hosts.run("h1", *command, env={"PATH": path, **pods.environ, **environ}, timeout=150.0)


def check(done: subprocess.CompletedProcess[str], pods: Pods, prefix: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    losses = set()
    for rank, host in RANKS:
        start = prefix.format(rank=rank, host=host)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(start)]
        assert f"rank {rank} of 4: loss " in line
        losses.add(line.partition("loss ")[2])
    assert len(losses) == 1
    # (A pod with our image runs its own daemons, and /tmp is shared with other hosts of the same names.)
    left = [line for name in pods.hosts.names for line in pods.hosts.leftovers(name)]
    assert [line for line in left if not line.startswith("/tmp/") and "sshd" not in line] == []


def test_without_arguments_and_names_that_come_late(pods: Pods, script: str) -> None:
    pods.know_workers(False)
    later = threading.Timer(8.0, pods.know_workers, (True,))
    later.start()
    try:
        done = launch(pods, "ringdance", "run", "python", script)
    finally:
        later.join()
    check(done, pods, "[{rank}]<{host}> ")
    assert f"s more for h2.{DOMAIN[pods.kind]}, h3.{DOMAIN[pods.kind]}" in done.stderr


def test_ranks_have_time_to_save(pods: Pods, tmp_path: Path) -> None:
    """The kubelet sends SIGTERM to the first process of the launcher's container."""
    (tmp_path / "saves.py").write_text(SAVES)
    log, path = tmp_path / "log", f"PATH={BIN}{os.pathsep}{os.environ['PATH']}"
    words = [path, *(f"{name}={value}" for name, value in pods.environ.items()), "ringdance", "run"]
    outer = pods.hosts.start("h1", "env", *words, "python", str(tmp_path / "saves.py"), "20", log=log)
    assert hosts.wait_until(lambda: log.read_text().count("ready") == 4, 60.0) is not None, log.read_text()
    (launcher,) = [pid for pid, line in pods.hosts.processes("h1").items() if "ringdance run" in line]
    os.kill(launcher, signal.SIGTERM)
    began = time.monotonic()
    waits = pods.hosts.run("h2", *UNTIL_RANKS_END)
    assert (waits.returncode, waits.stderr) == (0, "")
    assert 19.0 < time.monotonic() - began < 30.0
    assert hosts.wait_until(lambda: outer.poll() is not None, 40.0) is not None, log.read_text()
    assert log.read_text().count("saved after 1 signal") == 2, log.read_text()
    assert outer.returncode == 128 + signal.SIGTERM


def test_horovods_line(pods: Pods, script: str) -> None:
    pytest.importorskip("horovod")
    check(launch(pods, "horovodrun", "-np", "4", "python", script), pods, "[{rank}]<stdout>:")


def test_the_line_of_the_operators_examples(pods: Pods, script: str) -> None:
    """Scripts of such jobs call Open MPI 4's mpirun. Our program of that name in PATH accepts its options."""
    shim = pods.directory / "shim"
    subprocess.run([sys.executable, "-m", "ringdance", "mpirun", "--install-into", str(shim)], check=True)
    line = (
        "mpirun --allow-run-as-root -np 4 -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH "
        f"-mca pml ob1 -mca btl ^openib --tag-output python {script}"
    )
    done = launch(pods, *line.split(), PATH=f"{shim}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}")
    check(done, pods, "[1,{rank}]<stdout>:")


@pytest.mark.parametrize("launcher", ["", "mpiexec --allow-run-as-root -np 2"])
def test_ranks_in_the_launcher_s_pod_are_refused(pods: Pods, script: str, launcher: str) -> None:
    """Open MPI 5 would start them there, because it does not read the operator's host list."""
    if find_mpi().family != "openmpi":
        pytest.skip("other MPIs read the operator's list of hosts")
    done = launch(pods, *launcher.split(), "python", script, KUBERNETES_SERVICE_HOST="10.96.0.1")
    assert done.returncode != 0
    assert "has allocated 2 hosts to this job" in done.stderr
    assert "Start the script with `ringdance run python SCRIPT`" in done.stderr


def test_our_own_manifest(pods: Pods, script: str) -> None:
    """The manifest's commands for the pods work with the image's files, user and rights."""
    if find_mpi().family != "openmpi" and pods.kind == "TrainJob":
        pytest.skip("TrainJobs support only Open MPI")
    wanted = JobRequest(name="pi", image="image", command=["python", script], workers=2, slots=2)
    documents = manifest(replace(wanted, kind=pods.kind))
    first, last = documents[0], documents[-1]
    if pods.kind == "MPIJob":
        roles = last["spec"]["mpiReplicaSpecs"]
        worker = roles["Worker"]["template"]["spec"]
        command = roles["Launcher"]["template"]["spec"]["containers"][0]["command"]
    else:
        jobs = first["spec"]["template"]["spec"]["replicatedJobs"]
        worker = jobs[0]["template"]["spec"]["template"]["spec"]
        command = last["spec"]["trainer"]["command"]
    pods.use_our_image(ROOT, SSH_DIRECTORY)
    if launch(pods, *pods.as_container(sys.executable, "-c", "import ringdance")).returncode:
        pytest.skip("only root can read this Python or this clone")
    daemons = []
    for name in pods.workers:
        line = pods.as_container(*worker["containers"][0]["command"])
        daemons.append(pods.hosts.start(name, *line, log=pods.directory / f"{name}.sshd"))
    try:
        done = launch(pods, *pods.as_container(*command))
        said = "".join((pods.directory / f"{name}.sshd").read_text() for name in pods.workers)
        assert "Accepted publickey for mpiuser" in said, done.stderr + said
        check(done, pods, "[{rank}]<{host}> ")
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
