"""Graphs with several threads: gradients are exchanged during backward, and used only afterwards."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from other_settings import other_settings

import ringdance.tensorflow as hvd
from ringdance.tensorflow.graph import capi, in_flight

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
PATIENCE = 30.0  # seconds after which backward continues, and the test fails
# These tests give TensorFlow one operation thread, but a session can have more.
THREADS = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=3, use_per_session_threads=True)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", ["on", "auto"])
def test_backward_can_wait_for_the_first_exchange(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's gradient, computed last, waits until the last layer's has been exchanged."""
    exchanged: list[list[bool]] = []  # for each exchange that had started: was it complete?

    def until_exchanged(dy: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while True:
            done = [started.work.done() for started in list(in_flight._started.values())]
            if (done and all(done)) or time.monotonic() > end:
                exchanged.append(done)
                return dy
            time.sleep(0.001)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def watched(x: Any) -> Any:
        def gradient(dy: Any) -> Any:
            # A stateless operation, because its order relative to exchange starts is not fixed.
            dy = tf.numpy_function(until_exchanged, [dy], tf.float32, stateful=False)
            return tf.ensure_shape(dy, x.shape)

        return tf.identity(x), gradient

    @tf.function
    def step(first: Any, last: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([first, last])
            loss = tf.reduce_sum(last * watched(tf.tanh(first))) * (RANK + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [first, last])

    if overlap == "auto":  # as on a machine with spare cores
        monkeypatch.setattr("ringdance.training.gradients.cores.shared_cores", lambda pids: 64)
    with other_settings({"RINGDANCE_OVERLAP": overlap}), tf.Graph().as_default():
        first, last = (tf.compat.v1.placeholder(tf.float32, (300_000,)) for _ in range(2))  # two buckets
        gradients = step(first, last)
        with tf.compat.v1.Session(config=THREADS) as running:
            for count in range(1, 4):
                got = running.run(gradients, {first: np.zeros(300_000), last: np.ones(300_000)})
                assert exchanged == [[True]] * count
                np.testing.assert_allclose(got, [np.full(300_000, (SIZE + 1) / 2), np.zeros(300_000)])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_what_uses_gradients_waits_for_a_late_rank(overlap: str) -> None:
    @tf.function
    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.add_n([tf.reduce_sum(item) for item in given]) * (RANK + 1.0)
        return [item * 2.0 for item in hvd.DistributedGradientTape(tape).gradient(loss, list(given))]

    with other_settings({"RINGDANCE_OVERLAP": overlap}), tf.Graph().as_default():
        inputs = [tf.compat.v1.placeholder(tf.float32, (300_000,)) for _ in range(3)]  # more than one bucket
        doubled = step(*inputs)
        with tf.compat.v1.Session(config=THREADS) as running:
            for count in range(2 * SIZE):
                if count % SIZE == RANK:
                    time.sleep(0.3)
                got = running.run(doubled, {tensor: np.ones(300_000) for tensor in inputs})
                np.testing.assert_allclose(got, np.full((3, 300_000), SIZE + 1.0))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_run_that_fails_between_start_and_wait(overlap: str) -> None:
    """If a run fails on one rank or on all after an exchange has started, that exchange is not lost."""

    def until_started(dy: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while not in_flight._started and time.monotonic() < end:
            time.sleep(0.001)
        return dy

    @tf.function
    def step(first: Any, last: Any, index: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def failing(x: Any) -> Any:
            def gradient(dy: Any) -> Any:  # stateless operations, not ordered before the start
                dy = tf.ensure_shape(tf.numpy_function(until_started, [dy], tf.float32, False), x.shape)
                return dy + tf.gather(tf.zeros(1), index + tf.cast(0.0 * dy[0], tf.int32))

            return tf.identity(x), gradient

        with tf.GradientTape() as tape:
            tape.watch([first, last])
            loss = tf.reduce_sum(last * failing(tf.tanh(first))) * (RANK + 1.0)
        return hvd.DistributedGradientTape(tape).gradient(loss, [first, last])

    with other_settings({"RINGDANCE_OVERLAP": overlap}), tf.Graph().as_default():
        first, last = (tf.compat.v1.placeholder(tf.float32, (300_000,)) for _ in range(2))  # two buckets
        index = tf.compat.v1.placeholder(tf.int32, ())
        gradients = step(first, last, index)
        with tf.compat.v1.Session(config=THREADS) as running:
            for failed in ([0], [0], range(SIZE), range(SIZE)):
                inputs = {first: np.zeros(300_000), last: np.ones(300_000)}
                here = RANK in failed
                error = tf.errors.InvalidArgumentError if here else tf.errors.FailedPreconditionError
                said = "indices" if here else "because of the call on rank 0 on host .*: the run of its graph"
                with pytest.raises(error, match=said):
                    running.run(gradients, inputs | {index: 7 if here else 0})
                assert not in_flight._started
                got = running.run(gradients, inputs | {index: 0})
                np.testing.assert_allclose(got, [np.full(300_000, (SIZE + 1) / 2), np.zeros(300_000)])
    assert not in_flight._leftover
    assert not in_flight._unstarted
    assert not capi._numbers_in_use
