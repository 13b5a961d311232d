"""TensorFlow computes with this rank's share of the cores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd
from ringdance.host.limits import usable_cores
from ringdance.tensorflow import threads
from ringdance.tensorflow.graph import kernels
from ringdance.tensorflow.threads import computing_threads
from ringdance.training.gradients.options import share_of_cores

hvd.init()


@pytest.mark.ranks(2, 3, 4)
def test_init_gives_each_rank_its_share() -> None:
    assert tf.config.threading.get_intra_op_parallelism_threads() == share_of_cores()
    assert computing_threads() == share_of_cores()


@pytest.mark.ranks(1)
def test_a_rank_alone_keeps_all_cores() -> None:
    assert tf.config.threading.get_intra_op_parallelism_threads() == 0
    assert computing_threads() == usable_cores()


def test_a_gpu_leaves_the_cores_to_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    threads._on_gpu.cache_clear()
    try:
        assert computing_threads() == 1
    finally:
        threads._on_gpu.cache_clear()


def test_without_a_deadlock_time_kernels_wait_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(settings=SimpleNamespace(deadlock_time=0.0))
    monkeypatch.setattr(kernels.session, "engine", lambda: engine)
    limits: list[Any] = []
    kernels._wait_for(SimpleNamespace(wait=lambda limit=None: limits.append(limit)))  # type: ignore[arg-type]
    assert limits == [None]


def test_kernels_that_use_up_all_threads_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """tests/dropin/test_stall.py has two programs whose ranks wait for each other like this."""
    engine = SimpleNamespace(rank=hvd.rank(), settings=SimpleNamespace(deadlock_time=3.0))
    monkeypatch.setattr(kernels.session, "engine", lambda: engine)
    limits: list[Any] = []

    def wait(limit: Any = None) -> None:
        limits.append(limit)
        if limit:
            raise TimeoutError

    for number, said in ((2, ""), (1, "all 1 threads in which TensorFlow runs operations wait")):
        monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda n=number: n)
        kernels._wait_for(SimpleNamespace(wait=wait, name="gradient"))  # type: ignore[arg-type]
        assert said in caplog.text
        assert bool(said) is ("set_inter_op_parallelism_threads(3)" in caplog.text)
    assert limits == [1.5, None, 1.5, None]
    assert not kernels._waiting
