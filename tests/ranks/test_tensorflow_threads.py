"""TensorFlow computes with this rank's share of the cores."""

from __future__ import annotations

import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd
from ringdance.host.limits import usable_cores
from ringdance.tensorflow import threads
from ringdance.tensorflow.threads import computing_threads
from ringdance.training.gradients.cores import share_of_cores

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
