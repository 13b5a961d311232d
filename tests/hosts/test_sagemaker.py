"""A training job with SageMaker's MPI distribution, run by SageMaker's own toolkit, on two hosts.

Each host is laid out like the service's training containers, and the request is what our Estimator would
send. The toolkit's mpirun is ours, put into PATH as an image's builder would do it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hosts
import pytest
from hosts import Hosts
from jobs import TRAINING

from ringdance.submit.sagemaker import Estimator

pytestmark = pytest.mark.limit(300)
BIN = Path(sys.executable).parent
DONE = Path("/tmp/done.h1")  # tells the toolkit on other hosts to stop; /tmp is shared here

SETUP = """set -eu
mkdir -p /run/etc/upper /run/etc/work /run/opt/upper /run/opt/work
mount -t overlay etc -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
mount --bind {net}/hosts /etc/hosts
mount -t overlay opt -o lowerdir=/opt,upperdir=/run/opt/upper,workdir=/run/opt/work /opt
mkdir -p /opt/ml
"""
SCRIPT = f"""
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--fail", type=int, default=-1)
options = parser.parse_args()
words = os.environ["COLOUR"], os.environ["SM_HP_EPOCHS"], os.environ["NCCL_DEBUG"], str(options.epochs)
{TRAINING}
print("variables", *words, flush=True)
if int(os.environ["OMPI_COMM_WORLD_RANK"]) == options.fail:
    raise ValueError("as asked")
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("trained")
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    pytest.importorskip("sagemaker_training", reason="SageMaker's toolkit: pip install sagemaker-training")
    if hosts.why_not():
        pytest.skip(f"simulated hosts: {hosts.why_not()}")
    with tempfile.TemporaryDirectory(prefix="rdm-") as directory:
        there = Hosts(Path(directory) / "net", 2)
        try:
            for name in there.names:
                done = there.run(name, "sh", "-c", SETUP.format(net=Path(directory) / "net"))
                assert done.returncode == 0, done.stderr
            words = ["mpirun", "--install-into", f"{directory}/shim"]
            subprocess.run([sys.executable, "-m", "ringdance", *words], check=True)
            yield there
        finally:
            there.down()


class Container:
    """The toolkit's run on one host."""

    def __init__(self, there: Hosts, name: str, directory: Path, parameters: dict[str, str]) -> None:
        self.ml, self.log = directory / name, directory / f"{name}.log"
        for part in ("input/config", "input/data", "code", "model", "output"):
            (self.ml / part).mkdir(parents=True)
        (self.ml / "code" / "train.py").write_text(SCRIPT)
        kind = "ml.c5.xlarge"
        group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": there.names}
        files = {
            "hyperparameters": {**parameters, "sagemaker_submit_directory": json.dumps("/opt/ml/code")},
            "inputdataconfig": {},
            "resourceconfig": {
                "current_host": name, "hosts": there.names, "network_interface_name": "eth0",
                "current_instance_type": kind, "current_group_name": "homogeneousCluster",
                "instance_groups": [group],
            },
        }  # fmt: skip
        for title, content in files.items():
            (self.ml / "input" / "config" / f"{title}.json").write_text(json.dumps(content))
        there.run(name, "umount", "/opt/ml")
        assert there.run(name, "mount", "--bind", str(self.ml), "/opt/ml").returncode == 0
        path = f"{there.directory.parent / 'shim'}:{BIN}:{os.environ['PATH']}"
        self.process = there.start(name, "env", f"PATH={path}", str(BIN / "train"), log=self.log)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def failure(self) -> str:
        file = self.ml / "output" / "failure"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def start(two_hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., list[Container]]]:
    made: list[Container] = []

    def start_(**parameters: object) -> list[Container]:
        (tmp_path / "train.py").write_text(SCRIPT)
        distribution = {
            "mpi": {
                "enabled": True,
                "processes_per_host": 2,
                "custom_mpi_options": "-verbose --COLOUR=red --NCCL_DEBUG=WARN -mca btl_tcp_links 2 "
                "-x HOROVOD_TIMELINE=/opt/ml/output/timeline.json",
            }
        }
        with pytest.warns(UserWarning, match="COLOUR"):
            estimator = Estimator(
                "train.py", source_dir=str(tmp_path), role="arn:aws:iam::123456789012:role/Training",
                image_uri="image", instance_type="ml.c5.xlarge", instance_count=2, region="eu-west-1",
                hyperparameters={"epochs": 3, **parameters}, distribution=distribution,
            )  # fmt: skip
        request = estimator.request({})
        made.extend(
            Container(two_hosts, name, tmp_path, request["HyperParameters"]) for name in two_hosts.names
        )
        return made

    DONE.unlink(missing_ok=True)
    yield start_
    for container in made:
        container.process.kill()
        container.process.wait()
    DONE.unlink(missing_ok=True)
    for name in two_hosts.names:
        for pid in two_hosts.processes(name):
            subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def ranks_in(timeline: Path) -> set[str]:
    """Return the ranks that have exchanged something according to a timeline."""
    events = json.loads(timeline.read_text())
    named = [event for event in events if event["name"] == "process_name" and event["pid"]]
    names = {row["pid"]: row["args"]["name"] for row in named}
    active = {names[event["pid"]] for event in events if event["ph"] in "BX" and event["pid"]}
    return {name.partition(" (")[0] for name in active if name.startswith("rank ")}


def test_a_job_on_two_hosts(start: Callable[..., list[Container]], two_hosts: Hosts) -> None:
    first, second = start()
    assert first.process.wait(200) == 0, first.said + first.failure
    for rank in range(4):
        lines = [line for line in first.said.splitlines() if f"rank {rank} of 4: loss " in line]
        assert len(lines) == 1, first.said
        assert lines[0].startswith(f"[1,{rank}]<stdout>:")
    assert first.said.count("variables red 3 WARN 3") == 4
    assert (first.ml / "model" / "model.txt").read_text() == "trained"
    assert not (second.ml / "model" / "model.txt").exists()
    assert ranks_in(first.ml / "output" / "timeline.json") == {f"rank {i} on h{1 + i // 2}" for i in range(4)}
    assert not (second.ml / "output" / "timeline.json").exists()
    # The other host has seen the job's daemon start and exit.
    assert second.process.wait(100) == 0, second.said
    assert "Orted process exited" in second.said
    assert "status file found" in second.said
    left = [line for name in two_hosts.names for line in two_hosts.leftovers(name)]
    # (/tmp is shared with other hosts of the same names.)
    assert [line for line in left if not line.startswith("/tmp/")] == []


def test_a_failure_is_reported_to_the_service(start: Callable[..., list[Container]]) -> None:
    first, _ = start(fail=3)
    assert first.process.wait(200) != 0
    assert "ExecuteUserScriptError" in first.failure
    assert "ValueError: as asked" in first.said
    assert "first failure: rank 3 of 4 on h2" in first.said
