"""RayExecutor on a real Ray: a cluster of two nodes, and two machines if namespaces can be created."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ringdance.errors import LaunchError
from ringdance.submit import ray_nodes
from ringdance.submit.ray import RayExecutor, _fitting

SETTINGS = RayExecutor.create_settings(timeout_s=60, ssh_str="", nics=None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_workers": 2}, ValueError),
        ({"min_workers": 1, "num_workers": 2}, ValueError),
        ({"min_workers": 1}, NotImplementedError),
        ({}, ValueError),
        ({"num_workers": 2, "num_hosts": 2}, ValueError),
        ({"num_workers": 2, "gpus_per_worker": 1}, ValueError),
        ({"num_workers": 2, "gpus_per_worker": 0, "use_gpu": True}, ValueError),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        RayExecutor(SETTINGS, **arguments)


def test_bundles_of_a_placement_group_are_used_once() -> None:
    small, large = {"CPU": 1.0}, {"CPU": 4.0, "GPU": 2.0}
    assert _fitting([small, large, large], [{"CPU": 2}, {"CPU": 1}]) == [1, 0]
    with pytest.raises(LaunchError, match="use_current_placement_group"):
        _fitting([small, large], [{"CPU": 2}, {"CPU": 2}])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match="-m pip install ray"):
        RayExecutor(SETTINGS, num_workers=2).start()


def test_no_variable_of_the_first_machine_goes_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only settings are sent, because agents' connections are not encrypted, even if Ray's own are."""
    plans: list[Any] = []

    def job(ready: Any, *_: Any, **__: Any) -> Any:
        plans.append(ready.plan)
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(ray_nodes, "Job", job)
    assert ray_nodes.Node().run_job("1", [(os.uname().nodename, 2)], {}, "127.0.0.1", 5.0) == ""
    own = {"HF_TOKEN": "t", "PATH": "/bin", "RAY_REDIS_PASSWORD": "p", "RINGDANCE_CYCLE_TIME": "2"}
    assert plans[0].forwarded(own).keys() & own.keys() == {"RINGDANCE_CYCLE_TIME"}


def work(add: float) -> tuple[Any, ...]:
    import numpy as np

    import ringdance.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.array([hvd.rank() + add]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), float(total[0]), os.environ.get("COLOUR")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    ray.init(address=cluster.address)
    yield ray
    ray.shutdown()
    cluster.shutdown()


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def next(self) -> int:
        self.value += self.step
        return self.value


@pytest.mark.limit(150)
def test_functions_run_on_ranks_that_stay(cluster: Any) -> None:
    executor = RayExecutor(SETTINGS, num_workers=3)
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"COLOUR": "red"})
    with pytest.raises(LaunchError, match="runs already"):
        executor.start()
    assert executor.run(work, [1.0]) == [(rank, 3, rank, 6.0, "red") for rank in range(3)]
    assert executor.run(work, kwargs={"add": 0.0})[2][3] == 3.0
    assert cluster.get(executor.run_remote(lambda: os.environ["RINGDANCE_RANK"])) == ["0", "1", "2"]
    assert executor.execute(lambda counter: counter.next()) == [15, 15, 15]
    assert executor.execute_single(lambda counter: counter.next()) == 20
    assert executor.execute(lambda counter: counter.next()) == [25, 20, 20]
    pids = executor.run(os.getpid)
    executor.shutdown()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(LaunchError, match="start"):
        executor.run(work)


@pytest.mark.limit(150)
def test_a_rank_that_fails_ends_the_call_for_all(cluster: Any) -> None:
    def fail() -> None:
        import numpy as np

        import ringdance.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("as asked")
        hvd.allreduce(np.ones(1))  # would otherwise wait for rank 1

    executor = RayExecutor(SETTINGS, num_hosts=2, num_workers_per_host=1)
    executor.start()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 on .*ValueError: as asked.*Traceback"):
        executor.run(fail)
    executor.start()
    with pytest.raises(LaunchError, match=r"rank 0 on .* has died: exited with code 3"):
        executor.run(lambda: os._exit(3) if os.environ["RINGDANCE_RANK"] == "0" else None)


def sleep(path: str) -> None:
    with open(f"{path}/{os.environ['RINGDANCE_RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300.0)


@pytest.mark.limit(150)
@pytest.mark.parametrize("victim", ["rank", "actor"])
def test_what_is_killed_is_named_and_leaves_no_rank(cluster: Any, tmp_path: Path, victim: str) -> None:
    executor = RayExecutor(SETTINGS, num_hosts=2, num_workers_per_host=1)
    executor.start()
    calls = executor.run_remote(sleep, [str(tmp_path)])
    pids: list[int] = []

    def started() -> bool:
        pids[:] = [int(path.read_text() or 0) for path in sorted(tmp_path.iterdir())]
        return len(pids) == 2 and all(pids)

    wait_until(started)
    if victim == "rank":
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"rank 1 on .* has died: killed by SIGKILL"):
            cluster.get(calls[1])
        executor.shutdown()
    else:  # the one address both ranks use, as both nodes are this machine
        names = {process.pid: process.name() for process in psutil.Process(pids[0]).parents()}
        os.kill(next(pid for pid, name in names.items() if name.startswith("ray::Node")), signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    executor.shutdown()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.limit(150)
def test_no_room_is_told(cluster: Any) -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(LaunchError, match="did not provide"):
        RayExecutor(settings, num_hosts=3).start()


TWO_MACHINES = """
import sys, ray
sys.path.insert(0, sys.argv[1])
from test_ray import SETTINGS, RayExecutor, work
ray.init(address=sys.argv[2])
import cloudpickle, test_ray
cloudpickle.register_pickle_by_value(test_ray)
executor = RayExecutor(SETTINGS, num_hosts=2, num_workers_per_host=2)
executor.start()
print(executor.run(work, [1.0]))
executor.shutdown()
"""


@pytest.mark.limit(200)
def test_two_machines_form_one_world_without_ssh(tmp_path: Any) -> None:
    """The second node has another host name, so to MPI it is another machine."""
    pytest.importorskip("ray")
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("needs root, for another host name")
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    port = str(20000 + os.getpid() % 10000)
    ray = os.path.join(os.path.dirname(sys.executable), "ray")
    usual = (
        f"--num-cpus 2 --object-store-memory 80000000 --disable-usage-stats --temp-dir /tmp/rd{os.getpid()}"
    )
    start = f"{ray} start {usual}"
    script = (
        f"{start} --head --include-dashboard=false --port {port} >&2; "
        f"unshare --uts sh -c 'hostname other-machine; {ray} start --num-cpus 2 "
        f"--object-store-memory 80000000 --disable-usage-stats --address 127.0.0.1:{port} >&2'; "
        f"{sys.executable} -c '{TWO_MACHINES}' {os.path.dirname(__file__)} 127.0.0.1:{port}"
    )
    # The nodes' processes exit with their namespace.
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
        env=bare, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    shutil.rmtree(f"/tmp/rd{os.getpid()}", ignore_errors=True)
    # Local ranks start from 0 again on the second machine.
    expected = [(0, 4, 0, 10.0, None), (1, 4, 1, 10.0, None), (2, 4, 0, 10.0, None), (3, 4, 1, 10.0, None)]
    assert str(expected) in done.stdout, done.stdout + done.stderr
