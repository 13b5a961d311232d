"""Gradient tapes whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ringdance.core.recorder import StepMark
from ringdance.errors import ArgumentError
from ringdance.tensorflow.compression import Compression
from ringdance.tensorflow.exchange import plain
from ringdance.tensorflow.gradients import GradientReducer, groups_of
from ringdance.training.exports import Average
from ringdance.training.gradients.options import listed_layers
from ringdance.training.process_sets import ProcessSet, global_process_set


class _Tape:
    """Mixin with the methods of a distributed tape. It precedes the tape's own class in the base classes."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Exclude this variable's gradient from the reduction."""
        self._reducer.register_local(source)

    @plain
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
        **others: Any,
    ) -> Any:
        """Return the reduced gradients of ``target``, in the order and structure of ``sources``.

        Args:
            target: Passed to the tape's own method.
            sources: Variables, in the same order on all ranks.
            output_gradients: Passed to the tape's own method.
            use_generic_names: Accepted but has no effect. Names never depend on how a function was traced.
            **others: Passed to the tape's own method (``unconnected_gradients``).
        """
        computed = super().gradient(target, sources, output_gradients, **others)  # type: ignore[misc]
        if isinstance(sources, (tf.Variable, tf.Tensor)) or not isinstance(sources, Iterable):
            return self._reducer.reduce([computed], [sources])[0]
        flat = tf.nest.flatten(sources)
        reduced = self._reducer.reduce(tf.nest.flatten(computed), flat)
        return reduced if isinstance(sources, list) else tf.nest.pack_sequence_as(sources, reduced)

    @plain
    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of (source, gradient) pairs: one for local sources, one for reduced gradients."""
        listed = list(sources)
        gradients = self.gradient(target, listed, output_gradients, use_generic_names)
        pairs = list(zip(listed, gradients, strict=True))
        local = [pair for pair in pairs if self._reducer.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[0])]


def DistributedGradientTape(
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True, *,
    name: str = "DistributedGradientTape",
) -> Any:
    """Return a tape that shares the recording of ``gradtape`` and reduces gradients over the ranks.

    It works eagerly and in a ``tf.function``, and can be created before or after the ``with`` block.

    Args:
        gradtape: A ``tf.GradientTape``.
        device_dense: Device on which dense gradients enter the exchange.
        device_sparse: Device on which IndexedSlices enter the exchange.
        compression: ``Compression.fp16`` or ``.bf16`` halves the amount of data sent for float32 gradients.
        sparse_as_dense: If True, reduce IndexedSlices as dense tensors instead of gathering their rows.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: Gradients are divided by this factor before the sum, and the sum is
            multiplied by it (Average only).
        num_groups: Deprecated. Use ``groups``.
        groups: Number of groups, or lists of variables whose gradients are exchanged together.
        process_set: The participating ranks. On other ranks, gradients stay local.
        scale_local_gradients: If True, divide gradients of local sources by the number of ranks.
        name: Prefix of the exchange names, the same on all ranks. If several threads train models, use a
            different name for each model.

    Raises:
        ArgumentError: An argument is invalid.
    """
    reducer = GradientReducer(
        name, compression=compression, sparse_as_dense=sparse_as_dense, op=op,
        predivide=gradient_predivide_factor, groups=groups_of(groups, num_groups), process_set=process_set,
        scale_local_gradients=scale_local_gradients, device_dense=device_dense, device_sparse=device_sparse,
        step_mark=StepMark.GRADIENTS,
    )
    base = type(gradtape)
    if issubclass(base, _Tape):
        raise ArgumentError("This tape is already a DistributedGradientTape. Wrap a tape only once.")
    # A class attribute, because several distributed tapes may share one recording and its attributes.
    options = {"__module__": __name__, "_reducer": reducer}
    result: Any = object.__new__(type(base.__name__, (_Tape, base), options))
    result.__dict__ = gradtape.__dict__
    return result


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    process_set: ProcessSet = global_process_set, local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a ``DistributedGradientTape`` that keeps the gradients of some Keras layers local.

    ``local_layers`` is one or more built layers. Their trainable weights may differ between ranks, even in
    shape and number.

    Raises:
        ArgumentError: An element of ``local_layers`` is not a Keras layer.
    """
    layers = listed_layers(local_layers, tf.keras.layers.Layer)
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape
