"""Waiting times appear in TensorFlow's profiler while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import ringdance.tensorflow as hvd

hvd.init()


@pytest.mark.ranks(2, 3, 4)
def test_waits_are_spans(tmp_path: Path) -> None:
    in_graph = tf.function(lambda x: hvd.allreduce(x, name="in_graph"))
    in_graph(tf.ones(3))
    tf.profiler.experimental.start(str(tmp_path))
    in_graph(tf.ones(3))
    hvd.allreduce(tf.ones(3), name="at_once")
    tf.profiler.experimental.stop()
    hvd.allreduce(tf.ones(3), name="later")
    (path,) = tmp_path.rglob("*.xplane.pb")
    spans = path.read_bytes()
    for name in ("in_graph", "at_once", "later"):
        assert (b"ringdance WAIT allreduce." + name.encode() in spans) == (name != "later")
