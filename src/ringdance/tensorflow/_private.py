"""All private names of TensorFlow that the binding uses, with the reason and the fallback for each.

These names exist in TensorFlow 2.16 to 2.21. They are looked up when this module is imported. If a name is
missing, the binding uses the fallback described in this file. The tests also cover this case. For the private
names of Keras optimizers, see ``ringdance.keras._private``.
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


# eager.execute.must_record_gradient and eager.execute.record_gradient (which requires that eager.backprop is
# imported): record a call for gradient tapes as an operation whose type has a registered gradient. If either
# name is missing, tf.custom_gradient records the call, which is several times slower.
_find("eager.backprop", "_record_gradient")
_must_record = _find("eager.execute", "must_record_gradient")
_record_gradient = _find("eager.execute", "record_gradient")
RECORDS = _must_record is not None and _record_gradient is not None


def record(kind: str, inputs: Sequence[Any], text: Callable[[], str], outputs: Sequence[Any]) -> None:
    """Record an operation of type ``kind`` with the attribute ``text``, if a gradient tape is recording."""
    if RECORDS and _must_record():
        _record_gradient(kind, list(inputs), ("text", text().encode()), list(outputs))


# profiler.trace.enabled: True while TensorFlow's profiler is recording. If the name is missing, each wait
# creates a trace span, which itself checks whether the profiler is recording.
profiler_running: Callable[[], bool] = _find("profiler.trace", "enabled", lambda: True)


# ops.control_flow_util.GraphOrParentsInXlaContext: True if XLA will compile the graph. If the name is
# missing, XLA reports an unknown operation instead of our error message, which explains the fix.
in_xla_context: Callable[[Any], bool] = _find(
    "ops.control_flow_util", "GraphOrParentsInXlaContext", lambda graph: False
)


# keras.layers.BatchNormalization._moments: called by Keras in training, overridden by SyncBatchNormalization.
# If the name is missing, SyncBatchNormalization raises an error, because it would use local statistics.
def check_moments(layer: type) -> None:
    """Raise NotImplementedError if ``layer`` lacks the method that SyncBatchNormalization overrides."""
    if not hasattr(layer, "_moments"):
        raise NotImplementedError(
            "SyncBatchNormalization does not support this version of Keras, in which BatchNormalization has "
            "no method _moments. Use a different version of Keras."
        )


# EagerTensor._numpy: the tensor's memory as an array. If the name is missing, numpy() is used, which copies.
def numpy_of(tensor: Any) -> Any:
    """Return an eager tensor's values, without a copy if they are in host memory."""
    try:
        return tensor._numpy()
    except AttributeError:
        return tensor.numpy()
