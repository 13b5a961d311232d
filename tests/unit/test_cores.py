"""The number of cores that a process may use, and their use: affinity masks, cgroup quotas, a whole node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ringdance.core.monitor import core_use
from ringdance.core.monitor.core_use import CoreUse
from ringdance.core.monitor.sampler import Sampler
from ringdance.core.ring import Ring, RingReader
from ringdance.data.loader import Loader
from ringdance.host import limits

NODE = 64
V1_SELF = "9:name=systemd:/x\n2:cpu,cpuacct:/kubepods/pod7\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulate a node with 64 cores.

    Has masks by PID (0 is this process), files in /proc and /sys, and seconds of use per core.
    """
    masks: dict[int, set[int]] = {0: set(range(NODE))}
    used = dict.fromkeys(range(NODE), 0.0)
    now = SimpleNamespace(time=0.0)

    def put(path: str, text: str) -> None:
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mask(pid: int) -> set[int]:
        if pid not in masks:
            raise ProcessLookupError
        return masks[pid]

    def times(percpu: bool) -> list[Any]:
        class Times(tuple[float, ...]):
            idle = property(lambda self: self[1])

        return [Times((used[core], now.time - used[core])) for core in range(NODE)]

    monkeypatch.setattr(limits, "_ROOT", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", mask)
    monkeypatch.setattr("os.cpu_count", lambda: NODE)
    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(core_use.time, "monotonic", lambda: now.time)
    return SimpleNamespace(masks=masks, put=put, used=used, now=now)


def quota(machine: Any, cores: float, version: int) -> Any:
    """Give this process's cgroup a quota. Returns a function that sets its CPU seconds."""
    if version == 2:
        machine.put("/proc/self/cgroup", "0::/pod7\n")
        machine.put("/sys/fs/cgroup/cpu.max", "max 100000\n")
        machine.put("/sys/fs/cgroup/pod7/cpu.max", f"{cores * 100000:.0f} 100000\n")
        return lambda used: machine.put(
            "/sys/fs/cgroup/pod7/cpu.stat", f"usage_usec {used * 1e6:.0f}\nuser_usec 1\nnr_throttled 0\n"
        )
    # the host's path; the container sees its own directory as the root
    machine.put("/proc/self/cgroup", V1_SELF)
    machine.put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{cores * 100000:.0f}\n")
    machine.put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    machine.put("/sys/fs/cgroup/cpu/cpu.stat", "nr_periods 7\n")
    return lambda used: machine.put("/sys/fs/cgroup/cpuacct/cpuacct.usage", f"{used * 1e9:.0f}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_pod_has_its_quota_and_not_the_node(machine: Any, version: int) -> None:
    use = quota(machine, 4, version)
    use(0)
    assert limits.usable_cores() == 4
    assert limits.shared_cores([0, 0]) == 2
    pod = CoreUse()
    assert pod.cores == 4
    machine.now.time = 10
    machine.used |= dict.fromkeys(range(4), 10.0)  # 4 of 64 cores: the node is 94% idle, but the pod is not
    use(40)
    assert pod.share() == pytest.approx(1)
    machine.now.time = 20
    use(50)
    assert pod.share() == pytest.approx(0.25)
    machine.now.time = 30
    # other pods use all cores, so that nothing is left of the quota
    machine.used |= dict.fromkeys(range(NODE), 20.0)
    use(60)
    assert pod.share() == pytest.approx(1)


def test_a_quota_may_be_none_or_less_than_a_core(machine: Any) -> None:
    machine.put("/proc/self/cgroup", V1_SELF)
    machine.put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine.put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert (limits.usable_cores(), CoreUse().cores) == (NODE, NODE)
    quota(machine, 0.5, 2)(0)
    assert (limits.usable_cores(), limits.shared_cores([0]), CoreUse().cores) == (1, 0, 0.5)


def test_a_slurm_step_has_its_mask_and_its_ranks_share_it(machine: Any) -> None:
    step = {8, 9, 10, 11}
    machine.masks |= dict.fromkeys((0, 1, 2), step)
    assert limits.usable_cores() == 4
    # together the ranks' masks have fewer cores than the node, yet the ranks are not bound
    assert limits.shared_cores([1, 2]) == 2
    use = CoreUse([1, 2])
    machine.now.time = 10
    machine.used |= dict.fromkeys(step, 10.0)
    assert (use.cores, use.share()) == (4, pytest.approx(1))
    machine.masks |= {0: {8, 9}, 1: {8, 9}, 2: {10, 11}}  # the ranks are bound
    assert (limits.shared_cores([1, 2]), limits.usable_cores([1, 2]), limits.usable_cores()) == (2, 4, 2)
    machine.masks.pop(2)  # the process cannot be seen
    assert limits.shared_cores([1, 2]) == 1
    assert CoreUse([1]).cores == 2


def test_figures_of_a_pod_are_of_its_share(machine: Any) -> None:
    use = quota(machine, 4, 2)
    use(0)
    ring = Ring()
    sampler = Sampler([RingReader(ring.memory)])
    machine.now.time = 10
    machine.used |= dict.fromkeys(range(4), 10.0)
    use(40)
    (row,) = sampler.rows()
    assert (row["host_cpu_percent"], row["host_cores"]) == (100.0, 4)


def test_threads_that_decode_are_those_of_the_quota(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quota(machine, 3, 2)(0)
    monkeypatch.setattr("ringdance.data.loader.piece_of", lambda *given: 0)
    data: Any = SimpleNamespace(__len__=lambda self: 8)
    assert Loader(type("Data", (), vars(data))(), 2).threads == 3
