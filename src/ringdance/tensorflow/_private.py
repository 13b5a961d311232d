"""Private names of TensorFlow that the binding uses: why, and what happens without each.

Seen in TensorFlow 2.16 to 2.21. Each is looked up when this module is imported; where one is missing, the way
without it is taken, which the tests try too. Those of Keras's optimizers
are in ``ringdance.keras._private``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def _find(module: str, name: str, default: Any = None) -> Any:
    try:
        return getattr(import_module(f"tensorflow.python.{module}"), name)
    except (ImportError, AttributeError):
        return default


# eager.execute.must_record_gradient, eager.execute.record_gradient (which needs eager.backprop imported):
# record a call for gradient tapes as an operation of a type, whose gradient is registered. Without them
# tf.custom_gradient records it, and takes several times as long for each call.
_find("eager.backprop", "_record_gradient")
_must_record = _find("eager.execute", "must_record_gradient")
_record_gradient = _find("eager.execute", "record_gradient")
RECORDS = _must_record is not None and _record_gradient is not None


def record(kind: str, inputs: Sequence[Any], text: Callable[[], str], outputs: Sequence[Any]) -> None:
    """Record an operation of type ``kind`` with the attribute ``text``, if a gradient tape is recording."""
    if RECORDS and _must_record():
        _record_gradient(kind, list(inputs), ("text", text().encode()), list(outputs))


# profiler.trace.enabled: whether TensorFlow's profiler is recording. Without it each wait makes a span, which
# asks for itself.
profiler_running: Callable[[], bool] = _find("profiler.trace", "enabled", lambda: True)


# ops.control_flow_util.GraphOrParentsInXlaContext: whether XLA will compile the graph. Without it XLA says
# that it does not know the operation, instead of an error here that says what to do.
in_xla_context: Callable[[Any], bool] = _find(
    "ops.control_flow_util", "GraphOrParentsInXlaContext", lambda graph: False
)


# keras.layers.BatchNormalization._moments: overridden, Keras calls it in training. Without it
# SyncBatchNormalization is refused, as its statistics would be those of one rank.
def check_moments(layer: type) -> None:
    """Raise NotImplementedError if this Keras computes moments in an unknown way."""
    if not hasattr(layer, "_moments"):
        raise NotImplementedError("SyncBatchNormalization does not support this version of Keras.")


# EagerTensor._numpy: its memory as an array. Without it numpy() copies.
def numpy_of(tensor: Any) -> Any:
    """Return an eager tensor's values, without a copy where they are in the host's memory."""
    try:
        return tensor._numpy()
    except AttributeError:
        return tensor.numpy()
